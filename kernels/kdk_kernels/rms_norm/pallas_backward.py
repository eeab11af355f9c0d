"""rms_norm, backward, in Pallas: blocks of whole rows; dweight is summed in a block that stays in VMEM over the grid."""

import functools
from collections.abc import Sequence
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kdk_kernels.rms_norm.pallas import LEAST_ROWS, block_rows, widest


def _kernel(
    offset: float, N: int, H: int, rows: int, needed: Sequence[str], grad: Any, x: Any, weight: Any, rstd: Any, *out: Any
) -> None:
    results = dict(zip(needed, out))
    g, scale = grad[...].astype(jnp.float32), rstd[...]
    n = x[...].astype(jnp.float32) * scale
    if "x" in results:
        gw = g * (weight[...].astype(jnp.float32) + offset)
        mean = jnp.sum(gw * n, axis=-1, keepdims=True) / H
        results["x"][...] = ((gw - n * mean) * scale).astype(results["x"].dtype)
    if "weight" in results:
        i, share = pl.program_id(0), g * n
        if N % rows:  # the last block reaches past the end, where the values are anything
            row = jax.lax.broadcasted_iota(jnp.int32, share.shape, 0) + i * rows
            share = jnp.where(row < N, share, 0.0)

        @pl.when(i == 0)
        def _() -> None:
            results["weight"][...] = jnp.zeros_like(results["weight"])

        results["weight"][...] += jnp.sum(share, axis=0, keepdims=True)


def backward(
    grad: jax.Array, x: jax.Array, weight: jax.Array, rstd: jax.Array, offset: float, needs: str, *, interpret: Any = False
) -> tuple[Optional[jax.Array], Optional[jax.Array]]:
    H = x.shape[-1]
    flat = x.reshape(-1, H)
    N = flat.shape[0]
    rows = block_rows(N, 2 * H)
    needed = [name for name in ("x", "weight") if name in needs.split(",")]
    tile = pl.BlockSpec((rows, H), lambda i: (i, 0))
    row = pl.BlockSpec((1, H), lambda i: (0, 0))
    shapes = {"x": jax.ShapeDtypeStruct((N, H), x.dtype), "weight": jax.ShapeDtypeStruct((1, H), jnp.float32)}
    specs = {"x": tile, "weight": row}
    out = pl.pallas_call(
        functools.partial(_kernel, offset, N, H, rows, needed),
        out_shape=tuple(shapes[name] for name in needed),
        grid=(pl.cdiv(N, rows),),
        in_specs=[tile, tile, row, pl.BlockSpec((rows, 1), lambda i: (i, 0))],
        out_specs=tuple(specs[name] for name in needed),
        cost_estimate=pl.CostEstimate(
            flops=11 * N * H, transcendentals=0, bytes_accessed=(2 + ("x" in needed)) * N * H * x.dtype.itemsize
        ),
        interpret=interpret,
    )(grad.reshape(-1, H), flat, weight.reshape(1, H), rstd.reshape(-1, 1))
    results = dict(zip(needed, out))
    dx, dweight = results.get("x"), results.get("weight")
    return (
        None if dx is None else dx.reshape(x.shape),
        None if dweight is None else dweight.reshape(H).astype(weight.dtype),
    )


def supports(target: str, grad: Any, x: Any, weight: Any, rstd: Any, offset: float, needs: str) -> str | None:
    """A block holds whole rows; grad, x and dx stand in VMEM twice, and four float32 blocks of values."""
    limit = widest(target, 6 * x.itemsize + 16)
    return f"H = {x.shape[-1]}: a block of {LEAST_ROWS} rows fits up to H = {limit}" if x.shape[-1] > limit else None
