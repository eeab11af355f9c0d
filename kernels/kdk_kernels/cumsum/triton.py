"""cumsum in Triton: the walk of linear_recurrence, all factors 1."""

from typing import Optional

from torch import Tensor

from kdk_kernels.linear_recurrence.triton import SUM, new_like, scan
from kdk_kernels.linear_recurrence.triton import TUNABLE as TUNABLE


def forward(x: Tensor, *, steps: Optional[int] = None, channels: Optional[int] = None) -> Tensor:
    y = new_like(x)
    scan(SUM, None, x, out=y, steps=steps, channels=channels)
    return y
