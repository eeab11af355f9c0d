"""Rounding that belongs to an operator's meaning, and who says to which dtype."""

import threading

import pytest
import torch

from kdk.rounding import as_stored, storing

THIRD = torch.tensor([1 / 3], dtype=torch.float64)


def test_rounds_to_the_dtype_in_the_tensor_s_own() -> None:
    rounded = as_stored(THIRD.float(), torch.bfloat16)
    assert rounded.dtype == torch.float32 and torch.equal(rounded, THIRD.bfloat16().float())
    assert torch.equal(as_stored(THIRD, torch.float64), THIRD)


def test_storing_decides_for_an_oracle() -> None:
    with storing(torch.float16):
        assert torch.equal(as_stored(THIRD, torch.float64), THIRD.half().double())
        with storing(torch.bfloat16):
            assert torch.equal(as_stored(THIRD, torch.float64), THIRD.bfloat16().double())
        assert torch.equal(as_stored(THIRD, torch.float64), THIRD.half().double())
    assert torch.equal(as_stored(THIRD, torch.float64), THIRD)


def test_it_holds_for_the_thread_and_ends_with_an_error() -> None:
    seen = []
    with pytest.raises(ValueError), storing(torch.bfloat16):
        thread = threading.Thread(target=lambda: seen.append(as_stored(THIRD, torch.float64)))
        thread.start()
        thread.join()
        raise ValueError
    assert torch.equal(seen[0], THIRD) and torch.equal(as_stored(THIRD, torch.float64), THIRD)
