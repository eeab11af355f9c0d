"""Gradients of linear_recurrence for TPUs: the same walk in the other direction, with every factor a step late."""

from typing import Any, Optional

import jax

from kdk_kernels.linear_recurrence.pallas import BEFORE, scan, too_large
from kdk_kernels.linear_recurrence.pallas import TUNABLE as TUNABLE


def backward(
    grad: jax.Array,
    a: jax.Array,
    h: Optional[jax.Array],
    h0: Optional[jax.Array],
    reverse: bool,
    needs: str,
    *,
    steps: Optional[int] = None,
    channels: Optional[int] = None,
    interpret: Any = False,
) -> tuple[Optional[jax.Array], Optional[jax.Array], Optional[jax.Array]]:
    needed = needs.split(",")
    outputs = {"out": grad.dtype} if "b" in needed else {}
    if "a" in needed:
        outputs["dx"] = a.dtype
    if "h0" in needed and h0 is not None:
        outputs["dh0"] = h0.dtype
    if not outputs:
        return None, None, None
    h, start = (h, h0) if "a" in needed else (None, None)
    how = {"steps": steps, "channels": channels, "interpret": interpret}
    found = scan(BEFORE, grad, outputs, reverse=not reverse, a=a, h0=start, h=h, **how)
    return found.get("dx"), found.get("out"), found.get("dh0")


def supports(
    target: str, grad: Any, a: Any, h: Any, h0: Any, reverse: bool, needs: str,
    *, steps: Optional[int] = None, channels: Optional[int] = None,
) -> str | None:  # fmt: skip
    return too_large(target, grad, 5, steps, channels)
