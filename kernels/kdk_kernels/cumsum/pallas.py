"""cumsum for TPUs: the walk of linear_recurrence, all factors 1."""

from typing import Any

import jax

from kdk_kernels.linear_recurrence.pallas import SUM, scan


def forward(x: jax.Array, *, interpret: Any = False) -> jax.Array:
    return scan(SUM, x, {"out": x.dtype}, interpret=interpret)["out"]
