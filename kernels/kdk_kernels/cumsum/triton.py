"""cumsum in Triton: the walk of linear_recurrence, all factors 1."""

from torch import Tensor

from kdk_kernels.linear_recurrence.triton import SUM, new_like, scan


def forward(x: Tensor) -> Tensor:
    y = new_like(x)
    scan(SUM, None, x, out=y)
    return y
