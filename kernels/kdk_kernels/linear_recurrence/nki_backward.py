"""Gradients of linear_recurrence in NKI: the same walk in the other direction, with every factor a step late."""

from typing import Optional

from torch import Tensor

from kdk_kernels.linear_recurrence.nki import BEFORE, scan


def backward(
    grad: Tensor, a: Tensor, h: Optional[Tensor], h0: Optional[Tensor], reverse: bool, needs: str
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    needed = needs.split(",")
    da, db, dh0 = "a" in needed, "b" in needed, "h0" in needed and h0 is not None
    if not (da or db or dh0):
        return None, None, None
    found = scan(BEFORE, grad, reverse=not reverse, a=a, h=h if da else None, h0=h0, out=db, dx=da, dh0=dh0)
    return found.get("dx"), found.get("out"), found.get("dh0")
