"""Gradient of cumsum in Triton: the walk from the end."""

from typing import Optional

from torch import Tensor

from kdk_kernels.linear_recurrence.triton import SUM, new_like, scan
from kdk_kernels.linear_recurrence.triton import TUNABLE as TUNABLE


def backward(grad: Tensor, needs: str, *, steps: Optional[int] = None, channels: Optional[int] = None) -> Tensor:
    dx = new_like(grad)
    scan(SUM, None, grad, reverse=True, out=dx, steps=steps, channels=channels)
    return dx
