"""Gradient of logcumsumexp in NKI: the walk of linear_recurrence from the end, with factors exp(y_t - y_{t+1})."""

from torch import Tensor

from kdk_kernels.linear_recurrence.nki import DECAY, scan


def backward(grad: Tensor, x: Tensor, y: Tensor, needs: str) -> Tensor:
    return scan(DECAY, grad, reverse=True, a=y, x=x, dx=True)["dx"]
