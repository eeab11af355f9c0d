"""Gradient of logcumsumexp for TPUs: the walk of linear_recurrence from the end, with factors exp(y_t - y_{t+1})."""

from typing import Any, Optional

import jax

from kdk_kernels.linear_recurrence.pallas import DECAY, scan, too_large
from kdk_kernels.linear_recurrence.pallas import TUNABLE as TUNABLE


def backward(
    grad: jax.Array,
    x: jax.Array,
    y: jax.Array,
    needs: str,
    *,
    steps: Optional[int] = None,
    channels: Optional[int] = None,
    interpret: Any = False,
) -> jax.Array:
    return scan(DECAY, grad, {"dx": x.dtype}, reverse=True, a=y, x=x, steps=steps, channels=channels, interpret=interpret)["dx"]


def supports(
    target: str, grad: Any, x: Any, y: Any, needs: str, *, steps: Optional[int] = None, channels: Optional[int] = None
) -> str | None:
    return too_large(target, grad, 4, steps, channels)
