"""The tensors that a check draws: what cases.py says about their values."""

from dataclasses import replace

import pytest
import torch

import kdk.ops  # noqa: F401  (registers the operators)
from kdk.errors import DeclarationError
from kdk.registry import OPERATORS
from kdk_bench.declared_cases import cases_of
from kdk_bench.drawing import draw
from kdk_bench.generate import problems
from kdk_kernels.linear_recurrence import cases


def test_the_largest_magnitude() -> None:
    """Of the tensor that has one, whatever the kind of values; not of the others, nor of a gradient of that name."""
    op = OPERATORS["linear_recurrence"].op
    reached = {"a": 0.0, "b": 0.0}
    for problem in problems(op, "forward"):
        tensors = draw(op, ("a", "b"), problem, torch.float32, 0).tensors
        for name in reached:
            values = tensors[name].nan_to_num(nan=0.0)
            reached[name] = max(reached[name], float(values.abs().max()) if values.numel() else 0.0)
    assert reached["a"] == 1.0 and reached["b"] > 1e10


def test_a_largest_magnitude_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CASES", replace(cases.CASES, largest={"x": 1.0}))
    with pytest.raises(DeclarationError, match="limits the values of"):
        cases_of(OPERATORS["linear_recurrence"].op)
