"""rms_norm_dynamic_quant in Pallas: blocks of whole rows."""

import functools
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kdk_kernels.rms_norm.pallas import block_rows, too_wide
from kdk_kernels.rms_norm_dynamic_quant.reference import SMALLEST, largest_of

LEAST_ROWS = 32  # of a block: an 8-bit tile's
TUNABLE = {"rows": (32, 64, 128, 256, 512, 1024)}  # of a block


def quantised(y: Any, dtype: Any) -> tuple[Any, Any]:
    """(q, scale) of rows in float32. The largest value is NaN where a value is: the hardware's maximum need not say so."""
    largest = largest_of(jnp.dtype(dtype))
    nan = jnp.sum(jnp.where(y != y, 1.0, 0.0), axis=-1, keepdims=True) > 0
    peak = jnp.maximum(jnp.max(jnp.abs(y), axis=-1, keepdims=True), SMALLEST)
    peak = jnp.where(nan, jnp.nan, peak)
    q = y * (largest / peak)
    if dtype == jnp.int8:
        q = jnp.where(q == q, jnp.round(q), 0.0)
        return q.astype(jnp.int32).astype(jnp.int8), peak / largest
    return jnp.clip(q, -largest, largest).astype(dtype), peak / largest


def _kernel(eps: float, offset: float, H: int, x: Any, weight: Any, q: Any, scale: Any) -> None:
    values = x[...].astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.sum(values * values, axis=-1, keepdims=True) / H + eps)
    q[...], scale[...] = quantised(values * rstd * (weight[...].astype(jnp.float32) + offset), q.dtype)


def forward(
    x: jax.Array, weight: jax.Array, eps: float, offset: float, dtype: str, *, rows: Optional[int] = None, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    H = x.shape[-1]
    flat = x.reshape(-1, H)
    N = flat.shape[0]
    rows = block_rows(N, H, rows, LEAST_ROWS)
    q, scale = pl.pallas_call(
        functools.partial(_kernel, eps, offset, H),
        out_shape=(jax.ShapeDtypeStruct((N, H), dtype), jax.ShapeDtypeStruct((N, 1), jnp.float32)),
        grid=(pl.cdiv(N, rows),),
        in_specs=[pl.BlockSpec((rows, H), lambda i: (i, 0)), pl.BlockSpec((1, H), lambda i: (0, 0))],
        out_specs=(pl.BlockSpec((rows, H), lambda i: (i, 0)), pl.BlockSpec((rows, 1), lambda i: (i, 0))),
        cost_estimate=pl.CostEstimate(
            flops=7 * N * H, transcendentals=N, bytes_accessed=N * H * (x.dtype.itemsize + 1) + 4 * N
        ),
        interpret=interpret,
    )(flat, weight.reshape(1, H))
    return q.reshape(x.shape), scale.reshape(x.shape[:-1])


def supports(target: str, x: Any, weight: Any, eps: float, offset: float, dtype: str, *, rows: Optional[int] = None) -> str | None:
    """A block holds whole rows; x and q stand in VMEM twice, the values twice in float32."""
    return too_wide(target, x.shape[-1], 2 * x.itemsize + 2 + 8, rows, LEAST_ROWS)
