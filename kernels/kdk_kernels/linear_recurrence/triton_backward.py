"""Gradients of linear_recurrence in Triton: the same walk in the other direction, with every factor a step late."""

from typing import Optional

from torch import Tensor

from kdk_kernels.linear_recurrence.triton import BEFORE, new_like, scan
from kdk_kernels.linear_recurrence.triton import TUNABLE as TUNABLE


def backward(
    grad: Tensor, a: Tensor, h: Optional[Tensor], h0: Optional[Tensor], reverse: bool, needs: str,
    *, steps: Optional[int] = None, channels: Optional[int] = None,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    needed = needs.split(",")
    da = new_like(a) if "a" in needed else None
    db = new_like(grad) if "b" in needed else None
    dh0 = new_like(h0) if "h0" in needed and h0 is not None else None
    scan(BEFORE, a, grad, h0, reverse=not reverse, out=db, h=h, dx=da, dh0=dh0, steps=steps, channels=channels)
    return da, db, dh0
