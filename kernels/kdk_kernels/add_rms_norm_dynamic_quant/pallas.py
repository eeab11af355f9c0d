"""add_rms_norm_dynamic_quant in Pallas: blocks of whole rows."""

import functools
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kdk_kernels.rms_norm.pallas import block_rows, too_wide
from kdk_kernels.rms_norm_dynamic_quant.pallas import LEAST_ROWS, in_lanes, of_weight, prepare_weight, quantised, store_in_lanes
from kdk_kernels.rms_norm_dynamic_quant.pallas import TUNABLE as TUNABLE

SUBLANES = 8


def tiled_by_eight(N: int, rows: int, H: int) -> tuple[tuple[int, ...], Any]:
    """The shape of the sum as the kernel writes it, and its blocks: where N allows, 8 rows are a dimension.

    Beside an 8-bit result tpu7x's compiler gives a 16-bit one tiles of 16 rows, and then copies it into those of 8 that everybody takes.
    """
    if N % SUBLANES:
        return (N, H), pl.BlockSpec((rows, H), lambda i: (i, 0))
    return (N // SUBLANES, SUBLANES, H), pl.BlockSpec((rows // SUBLANES, SUBLANES, H), lambda i: (i, 0, 0))


def _kernel(
    eps: float, offset: float, H: int,
    x: Any, residual: Any, weight: Any, q: Any, scale: Any, new_residual: Any, scaled: Any, power: Any,
) -> None:  # fmt: skip
    prepare_weight(offset, weight, scaled, power)
    total = x[...].astype(jnp.float32) + residual[...].astype(jnp.float32)
    rounded = total.reshape(new_residual.shape).astype(x.dtype)
    new_residual[...] = rounded
    q[...], column = quantised(rounded.astype(jnp.float32).reshape(total.shape), eps, H, scaled, power, q.dtype)
    store_in_lanes(scale, column)


def forward(
    x: jax.Array, residual: jax.Array, weight: jax.Array, eps: float, offset: float, dtype: str,
    *, rows: Optional[int] = None, interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    H = x.shape[-1]
    flat = x.reshape(-1, H)
    N = flat.shape[0]
    rows = block_rows(N, 2 * H, rows, LEAST_ROWS)
    tile = pl.BlockSpec((rows, H), lambda i: (i, 0))
    scales, line = in_lanes(N, rows)
    sums, tile_of_sums = tiled_by_eight(N, rows, H)
    q, scale, new_residual = pl.pallas_call(
        functools.partial(_kernel, eps, offset, H),
        out_shape=(jax.ShapeDtypeStruct((N, H), dtype), scales, jax.ShapeDtypeStruct(sums, x.dtype)),
        grid=(pl.cdiv(N, rows),),
        in_specs=[tile, tile, pl.BlockSpec((1, H), lambda i: (0, 0))],
        out_specs=(tile, line, tile_of_sums),
        scratch_shapes=of_weight(H),
        cost_estimate=pl.CostEstimate(
            flops=8 * N * H, transcendentals=N, bytes_accessed=N * H * (3 * x.dtype.itemsize + 1) + 4 * N
        ),
        interpret=interpret,
    )(flat, residual.reshape(-1, H), weight.reshape(1, H))
    return q.reshape(x.shape), scale.reshape(-1)[:N].reshape(x.shape[:-1]), new_residual.reshape(x.shape)


def supports(
    target: str, x: Any, residual: Any, weight: Any, eps: float, offset: float, dtype: str, *, rows: Optional[int] = None
) -> str | None:
    """A block holds whole rows; x, residual, q and the sum stand in VMEM twice, the values twice in float32, the weight once more."""
    return too_wide(target, x.shape[-1], 6 * x.itemsize + 2 + 8 + 1, rows, LEAST_ROWS)
