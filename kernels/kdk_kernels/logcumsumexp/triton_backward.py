"""Gradient of logcumsumexp in Triton: the walk of linear_recurrence from the end, with factors exp(y_t - y_{t+1})."""

from typing import Optional

from torch import Tensor

from kdk_kernels.linear_recurrence.triton import DECAY, new_like, scan
from kdk_kernels.linear_recurrence.triton import TUNABLE as TUNABLE


def backward(grad: Tensor, x: Tensor, y: Tensor, needs: str, *, steps: Optional[int] = None, channels: Optional[int] = None) -> Tensor:
    dx = new_like(x)
    scan(DECAY, y, grad, reverse=True, x=x, dx=dx, steps=steps, channels=channels)
    return dx
