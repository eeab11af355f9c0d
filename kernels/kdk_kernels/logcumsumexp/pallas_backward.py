"""Gradient of logcumsumexp for TPUs: the walk of linear_recurrence from the end, with factors exp(y_t - y_{t+1})."""

from typing import Any

import jax

from kdk_kernels.linear_recurrence.pallas import DECAY, scan


def backward(grad: jax.Array, x: jax.Array, y: jax.Array, needs: str, *, interpret: Any = False) -> jax.Array:
    return scan(DECAY, grad, {"dx": x.dtype}, reverse=True, a=y, x=x, interpret=interpret)["dx"]
