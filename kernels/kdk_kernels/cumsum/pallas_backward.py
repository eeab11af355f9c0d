"""Gradient of cumsum for TPUs: the walk from the end."""

from typing import Any, Optional

import jax

from kdk_kernels.linear_recurrence.pallas import SUM, scan, too_large
from kdk_kernels.linear_recurrence.pallas import TUNABLE as TUNABLE


def backward(
    grad: jax.Array, needs: str, *, steps: Optional[int] = None, channels: Optional[int] = None, interpret: Any = False
) -> jax.Array:
    return scan(SUM, grad, {"out": grad.dtype}, reverse=True, steps=steps, channels=channels, interpret=interpret)["out"]


def supports(target: str, grad: Any, needs: str, *, steps: Optional[int] = None, channels: Optional[int] = None) -> str | None:
    return too_large(target, grad, 2, steps, channels)
