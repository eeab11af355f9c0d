"""rms_norm_dynamic_quant in Pallas: blocks of whole rows."""

import functools
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kdk_kernels.rms_norm.pallas import block_rows, too_wide
from kdk_kernels.rms_norm_dynamic_quant.reference import SMALLEST, largest_of

LEAST_ROWS = 32  # of a block: an 8-bit tile's
LANES = 128
TO_INTEGER = 1.5 * 2.0**23  # added to a small float32: the last bit of the sum is worth 1
TUNABLE = {"rows": (32, 64, 128, 256, 512, 1024)}  # of a block


def quantised(y: Any, dtype: Any) -> tuple[Any, Any]:
    """(q, scale) of rows in float32. The largest value is NaN where a value is: the hardware's maximum need not say so, but a sum is.

    The vector units are the limit, so what is done for every value is little. TO_INTEGER rounds to the nearest integer, ties to
    even, and leaves it in the low bits of the sum. Those of a NaN, which a row with a NaN or an infinity may have, are 0.
    """
    largest, size = largest_of(jnp.dtype(dtype)), jnp.abs(y)
    peak = jnp.maximum(jnp.max(size, axis=-1, keepdims=True), SMALLEST)
    total = jnp.sum(size, axis=-1, keepdims=True)
    nan = total != total
    scale = jnp.where(nan, jnp.nan, peak) / largest
    if dtype == jnp.int8:
        q = y * jnp.where(nan, 0.0, largest / peak)
        return jax.lax.bitcast_convert_type(q + TO_INTEGER, jnp.int32).astype(jnp.int8), scale
    q = y * jnp.where(nan, jnp.nan, largest / peak)
    return jnp.clip(q, -largest, largest).astype(dtype), scale


def store_in_lanes(row: Any, column: Any) -> None:
    """A number for every row (n, 1) side by side into a block (1, 1, n). As (N, 1) they would lie 128 apart, for XLA to collect."""
    for start in range(0, len(column), LANES):
        part = column[start : start + LANES]
        here = jax.lax.broadcasted_iota(jnp.int32, (len(part), LANES), 0) == jax.lax.broadcasted_iota(jnp.int32, (len(part), LANES), 1)
        row[0, :, start : start + len(part)] = jnp.sum(jnp.where(here, part, 0.0), axis=0, keepdims=True)[:, : len(part)]


def in_lanes(N: int, rows: int) -> tuple[Any, Any]:
    """The shape of such a result and its blocks."""
    return jax.ShapeDtypeStruct((pl.cdiv(N, rows), 1, rows), jnp.float32), pl.BlockSpec((1, 1, rows), lambda i: (i, 0, 0))


def _kernel(eps: float, offset: float, H: int, x: Any, weight: Any, q: Any, scale: Any) -> None:
    values = x[...].astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.sum(values * values, axis=-1, keepdims=True) / H + eps)
    q[...], column = quantised(values * rstd * (weight[...].astype(jnp.float32) + offset), q.dtype)
    store_in_lanes(scale, column)


def forward(
    x: jax.Array, weight: jax.Array, eps: float, offset: float, dtype: str, *, rows: Optional[int] = None, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    H = x.shape[-1]
    flat = x.reshape(-1, H)
    N = flat.shape[0]
    rows = block_rows(N, H, rows, LEAST_ROWS)
    scales, line = in_lanes(N, rows)
    q, scale = pl.pallas_call(
        functools.partial(_kernel, eps, offset, H),
        out_shape=(jax.ShapeDtypeStruct((N, H), dtype), scales),
        grid=(pl.cdiv(N, rows),),
        in_specs=[pl.BlockSpec((rows, H), lambda i: (i, 0)), pl.BlockSpec((1, H), lambda i: (0, 0))],
        out_specs=(pl.BlockSpec((rows, H), lambda i: (i, 0)), line),
        cost_estimate=pl.CostEstimate(
            flops=7 * N * H, transcendentals=N, bytes_accessed=N * H * (x.dtype.itemsize + 1) + 4 * N
        ),
        interpret=interpret,
    )(flat, weight.reshape(1, H))
    return q.reshape(x.shape), scale.reshape(-1)[:N].reshape(x.shape[:-1])


def supports(target: str, x: Any, weight: Any, eps: float, offset: float, dtype: str, *, rows: Optional[int] = None) -> str | None:
    """A block holds whole rows; x and q stand in VMEM twice, the values twice in float32."""
    return too_wide(target, x.shape[-1], 2 * x.itemsize + 2 + 8, rows, LEAST_ROWS)
