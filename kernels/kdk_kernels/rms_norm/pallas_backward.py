"""rms_norm, backward, in Pallas: blocks of whole rows; dweight is summed in a block that stays in VMEM over the grid."""

import functools
from collections.abc import Sequence
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kdk_kernels.rms_norm.pallas import TUNABLE as TUNABLE
from kdk_kernels.rms_norm.pallas import block_rows, too_wide


def _kernel(
    offset: float, N: int, H: int, rows: int, needed: Sequence[str], grad: Any, x: Any, weight: Any, rstd: Any, *refs: Any
) -> None:
    """refs: the gradient to add to dx, where there is one, then the results that `needed` names."""
    results = dict(zip(reversed(needed), reversed(refs)))
    g, scale = grad[...].astype(jnp.float32), rstd[...]
    n = x[...].astype(jnp.float32) * scale
    of_x = [results[name] for name in needed if name != "weight"]
    if of_x:
        gw = g * (weight[...].astype(jnp.float32) + offset)
        mean = jnp.sum(gw * n, axis=-1, keepdims=True) / H
        dx = (gw - n * mean) * scale
        if len(refs) > len(needed):
            dx += refs[0][...].astype(jnp.float32)
        for result in of_x:
            result[...] = dx.astype(result.dtype)
    if "weight" in results:
        i, share = pl.program_id(0), g * n
        if N % rows:  # the last block reaches past the end, where the values are anything
            row = jax.lax.broadcasted_iota(jnp.int32, share.shape, 0) + i * rows
            share = jnp.where(row < N, share, 0.0)

        @pl.when(i == 0)
        def _() -> None:
            results["weight"][...] = jnp.zeros_like(results["weight"])

        results["weight"][...] += jnp.sum(share, axis=0, keepdims=True)


def gradients(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    rstd: jax.Array,
    offset: float,
    needed: Sequence[str],
    more: Optional[jax.Array] = None,
    rows: Optional[int] = None,
    interpret: Any = False,
) -> dict[str, jax.Array]:
    """The needed ones of dx ("x"), a copy of it ("residual") and dweight ("weight"); `more` is added to dx before it is rounded."""
    H = x.shape[-1]
    flat = x.reshape(-1, H)
    N = flat.shape[0]
    extra = [more.reshape(-1, H)] if more is not None else []
    rows = block_rows(N, (2 + len(extra) + ("residual" in needed)) * H, rows)
    tile = pl.BlockSpec((rows, H), lambda i: (i, 0))
    row = pl.BlockSpec((1, H), lambda i: (0, 0))
    like_x, like_weight = jax.ShapeDtypeStruct((N, H), x.dtype), jax.ShapeDtypeStruct((1, H), jnp.float32)
    moved = 2 + len(extra) + sum(name != "weight" for name in needed)
    out = pl.pallas_call(
        functools.partial(_kernel, offset, N, H, rows, needed),
        out_shape=tuple(like_weight if name == "weight" else like_x for name in needed),
        grid=(pl.cdiv(N, rows),),
        in_specs=[tile, tile, row, pl.BlockSpec((rows, 1), lambda i: (i, 0)), *(tile for _ in extra)],
        out_specs=tuple(row if name == "weight" else tile for name in needed),
        cost_estimate=pl.CostEstimate(
            flops=(11 + len(extra)) * N * H, transcendentals=0, bytes_accessed=moved * N * H * x.dtype.itemsize
        ),
        interpret=interpret,
    )(grad.reshape(-1, H), flat, weight.reshape(1, H), rstd.reshape(-1, 1), *extra)
    return {
        name: result.reshape(H).astype(weight.dtype) if name == "weight" else result.reshape(x.shape)
        for name, result in zip(needed, out)
    }


def backward(
    grad: jax.Array, x: jax.Array, weight: jax.Array, rstd: jax.Array, offset: float, needs: str,
    *, rows: Optional[int] = None, interpret: Any = False,
) -> tuple[Optional[jax.Array], Optional[jax.Array]]:  # fmt: skip
    needed = [name for name in ("x", "weight") if name in needs.split(",")]
    results = gradients(grad, x, weight, rstd, offset, needed, rows=rows, interpret=interpret)
    return results.get("x"), results.get("weight")


def supports(
    target: str, grad: Any, x: Any, weight: Any, rstd: Any, offset: float, needs: str, *, rows: Optional[int] = None
) -> str | None:
    """A block holds whole rows; grad, x and dx stand in VMEM twice, and four float32 blocks of values."""
    return too_wide(target, x.shape[-1], 6 * x.itemsize + 16, rows)
