"""rms_norm, forward, in Pallas: blocks of whole rows."""

import functools
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kdk.backends.pallas import SCOPED_VMEM

LEAST_ROWS = 16  # of a block: a bfloat16 tile's
TUNABLE = {"rows": (16, 32, 64, 128, 256, 512, 1024)}  # of a block
BLOCK_BYTES = 2 << 20  # of float32 values in a block; some five such blocks live in the 16 MiB of scoped VMEM of a v5e


def block_rows(N: int, H: int, rows: Optional[int], least: int = LEAST_ROWS) -> int:
    """Rows of a block: the given ones, or a multiple of the least that suits rows of H values; or all there are."""
    if rows is None:
        fitting = max(least, BLOCK_BYTES // (4 * H) // least * least)
        return N if fitting >= N else min(fitting, 512)
    return min(rows, N)


def _kernel(eps: float, offset: float, H: int, x: Any, weight: Any, y: Any, rstd: Any) -> None:
    values = x[...].astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.sum(values * values, axis=-1, keepdims=True) / H + eps)
    y[...] = (values * scale * (weight[...].astype(jnp.float32) + offset)).astype(y.dtype)
    rstd[...] = scale


def forward(
    x: jax.Array, weight: jax.Array, eps: float, offset: float, *, rows: Optional[int] = None, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    H = x.shape[-1]
    flat = x.reshape(-1, H)
    N = flat.shape[0]
    rows = block_rows(N, H, rows)
    y, rstd = pl.pallas_call(
        functools.partial(_kernel, eps, offset, H),
        out_shape=(jax.ShapeDtypeStruct((N, H), x.dtype), jax.ShapeDtypeStruct((N, 1), jnp.float32)),
        grid=(pl.cdiv(N, rows),),
        in_specs=[pl.BlockSpec((rows, H), lambda i: (i, 0)), pl.BlockSpec((1, H), lambda i: (0, 0))],
        out_specs=(pl.BlockSpec((rows, H), lambda i: (i, 0)), pl.BlockSpec((rows, 1), lambda i: (i, 0))),
        cost_estimate=pl.CostEstimate(
            flops=4 * N * H, transcendentals=N, bytes_accessed=2 * N * H * x.dtype.itemsize + 4 * N
        ),
        interpret=interpret,
    )(flat, weight.reshape(1, H))
    return y.reshape(x.shape), rstd.reshape(x.shape[:-1])


def too_wide(target: str, H: int, bytes_per_element: int, rows: Optional[int], least: int = LEAST_ROWS) -> str | None:
    """Why a block of the given rows, or of the least, does not fit VMEM, with the rows of the weight beside it."""
    rows = rows or least
    limit = SCOPED_VMEM.get(target, min(SCOPED_VMEM.values())) // (rows * (bytes_per_element + 1))
    return f"H = {H}: a block of {rows} rows fits up to H = {limit}" if limit < H else None


def supports(target: str, x: Any, weight: Any, eps: float, offset: float, *, rows: Optional[int] = None) -> str | None:
    """A block holds whole rows; x and y stand in VMEM twice, the values once in float32."""
    return too_wide(target, x.shape[-1], 4 * x.itemsize + 4, rows)
