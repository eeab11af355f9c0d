"""rms_norm_dynamic_quant in Pallas: blocks of whole rows."""

import functools
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdk_kernels.rms_norm.pallas import block_rows, too_wide
from kdk_kernels.rms_norm_dynamic_quant.reference import SMALLEST, largest_of

LEAST_ROWS = 32  # of a block: an 8-bit tile's
LANES = 128
FLOAT32_MAX = 3.4028234663852886e38
TO_INTEGER = 1.5 * 2.0**23  # added to a small float32: the last bit of the sum is worth 1
TUNABLE = {"rows": (32, 64, 128, 256, 512, 1024)}  # of a block


def prepare_weight(offset: float, weight: Any, scaled: Any, power: Any) -> None:
    """In the grid's first step: offset + weight, over the power of two that leaves no more than a half, for `quantised`.

    A value times such a weight does not overflow; an infinity times it is no NaN, which the hardware's maximum may drop, zero
    being a smallest number here. A weight that is not finite makes the power NaN, and with it every scale.
    """

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        given = weight[...].astype(jnp.float32) + offset
        most, total = jnp.max(jnp.abs(given), keepdims=True), jnp.sum(jnp.abs(given), keepdims=True)
        exponent = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(most, jnp.int32) & 0x7F800000, jnp.float32)
        over = 4.0 * jnp.clip(exponent, 2.0**-100, 2.0**100)
        power[...] = jnp.where(jnp.isfinite(total), over, jnp.nan)
        scaled[...] = jnp.where(given == 0.0, 2.0**-126, given / over)


def quantised(values: Any, eps: float, H: int, scaled: Any, power: Any, dtype: Any) -> tuple[Any, Any]:
    """(q, scale) of rows in float32, normalised. scaled, power: of `prepare_weight`.

    The vector units are the limit, so what is done for every value is little: rstd, the same for a row, waits for the columns. Of a
    row with a NaN the sum of squares is one. TO_INTEGER rounds to the nearest integer, ties to even, and leaves it in the low bits of
    the sum. Those of a NaN, which a row of zeros or one that is not finite may have, are 0.
    """
    largest, products = largest_of(jnp.dtype(dtype)), values * scaled[...]
    rstd = jax.lax.rsqrt(jnp.sum(values * values, axis=-1, keepdims=True) / H + eps) * power[...]
    peak = jnp.max(jnp.abs(products), axis=-1, keepdims=True) * rstd
    nan, peak = peak != peak, jnp.maximum(peak, SMALLEST)
    scale, factor = jnp.where(nan, jnp.nan, peak) / largest, rstd * (largest / peak)
    if dtype == jnp.int8:
        return jax.lax.bitcast_convert_type(products * factor + TO_INTEGER, jnp.int32).astype(jnp.int8), scale
    return jnp.clip(products * jnp.minimum(factor, FLOAT32_MAX), -largest, largest).astype(dtype), scale


def store_in_lanes(row: Any, column: Any) -> None:
    """A number for every row (n, 1) side by side into a block (1, 1, n). As (N, 1) they would lie 128 apart, for XLA to collect."""
    for start in range(0, len(column), LANES):
        part = column[start : start + LANES]
        here = jax.lax.broadcasted_iota(jnp.int32, (len(part), LANES), 0) == jax.lax.broadcasted_iota(jnp.int32, (len(part), LANES), 1)
        row[0, :, start : start + len(part)] = jnp.sum(jnp.where(here, part, 0.0), axis=0, keepdims=True)[:, : len(part)]


def in_lanes(N: int, rows: int) -> tuple[Any, Any]:
    """The shape of such a result and its blocks."""
    return jax.ShapeDtypeStruct((pl.cdiv(N, rows), 1, rows), jnp.float32), pl.BlockSpec((1, 1, rows), lambda i: (i, 0, 0))


def of_weight(H: int) -> list[Any]:
    """The scratch that `prepare_weight` fills."""
    return [pltpu.VMEM((1, H), jnp.float32), pltpu.VMEM((1, 1), jnp.float32)]


def _kernel(eps: float, offset: float, H: int, x: Any, weight: Any, q: Any, scale: Any, scaled: Any, power: Any) -> None:
    prepare_weight(offset, weight, scaled, power)
    q[...], column = quantised(x[...].astype(jnp.float32), eps, H, scaled, power, q.dtype)
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
        scratch_shapes=of_weight(H),
        cost_estimate=pl.CostEstimate(
            flops=7 * N * H, transcendentals=N, bytes_accessed=N * H * (x.dtype.itemsize + 1) + 4 * N
        ),
        interpret=interpret,
    )(flat, weight.reshape(1, H))
    return q.reshape(x.shape), scale.reshape(-1)[:N].reshape(x.shape[:-1])


def supports(target: str, x: Any, weight: Any, eps: float, offset: float, dtype: str, *, rows: Optional[int] = None) -> str | None:
    """A block holds whole rows; x and q stand in VMEM twice, the values twice in float32, the weight once more."""
    return too_wide(target, x.shape[-1], 2 * x.itemsize + 2 + 8 + 1, rows, LEAST_ROWS)
