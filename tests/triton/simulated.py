"""What the tests of the Triton simulator share."""

import pytest
import torch

from kdk.backends.triton.sanitizer import KernelMemoryError
from kdk.backends.triton.simulate import interpret

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
BLOCK = 1024


def launch(kernel, *args, target="sm_90", grid=(1,), **constants):
    with interpret(target=target):
        kernel[grid](*args, **constants)


def sample(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def fault(code, run):
    """The memory error that `run` must raise, its text checked for the argument and the program."""
    with pytest.raises(KernelMemoryError) as caught, interpret():
        run()
    assert caught.value.code == code
    assert caught.value.argument in str(caught.value) and str(caught.value.program) in str(caught.value)
    return caught.value


def passes(run):
    with interpret():
        run()
