"""add_rms_norm, forward, in Pallas: blocks of whole rows."""

import functools
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kdk_kernels.rms_norm.pallas import TUNABLE as TUNABLE
from kdk_kernels.rms_norm.pallas import block_rows, too_wide


def _kernel(
    eps: float, offset: float, H: int, x: Any, residual: Any, weight: Any, y: Any, new_residual: Any, rstd: Any
) -> None:
    total = (x[...].astype(jnp.float32) + residual[...].astype(jnp.float32)).astype(x.dtype)
    new_residual[...] = total
    values = total.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.sum(values * values, axis=-1, keepdims=True) / H + eps)
    y[...] = (values * scale * (weight[...].astype(jnp.float32) + offset)).astype(y.dtype)
    rstd[...] = scale


def forward(
    x: jax.Array, residual: jax.Array, weight: jax.Array, eps: float, offset: float,
    *, rows: Optional[int] = None, interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    H = x.shape[-1]
    flat = x.reshape(-1, H)
    N = flat.shape[0]
    rows = block_rows(N, 2 * H, rows)
    tile = pl.BlockSpec((rows, H), lambda i: (i, 0))
    like_x = jax.ShapeDtypeStruct((N, H), x.dtype)
    y, new_residual, rstd = pl.pallas_call(
        functools.partial(_kernel, eps, offset, H),
        out_shape=(like_x, like_x, jax.ShapeDtypeStruct((N, 1), jnp.float32)),
        grid=(pl.cdiv(N, rows),),
        in_specs=[tile, tile, pl.BlockSpec((1, H), lambda i: (0, 0))],
        out_specs=(tile, tile, pl.BlockSpec((rows, 1), lambda i: (i, 0))),
        cost_estimate=pl.CostEstimate(
            flops=5 * N * H, transcendentals=N, bytes_accessed=4 * N * H * x.dtype.itemsize + 4 * N
        ),
        interpret=interpret,
    )(flat, residual.reshape(-1, H), weight.reshape(1, H))
    return y.reshape(x.shape), new_residual.reshape(x.shape), rstd.reshape(x.shape[:-1])


def supports(
    target: str, x: Any, residual: Any, weight: Any, eps: float, offset: float, *, rows: Optional[int] = None
) -> str | None:
    """A block holds whole rows; x, residual and both results stand in VMEM twice, the values twice in float32."""
    return too_wide(target, x.shape[-1], 8 * x.itemsize + 8, rows)
