"""add_rms_norm, backward, in Pallas: rms_norm's kernel, which adds the gradient of the residual stream to its own."""

from collections.abc import Sequence
from typing import Any, Optional

import jax
from jax.experimental import pallas as pl

from kdk_kernels.rms_norm.pallas import TUNABLE as TUNABLE
from kdk_kernels.rms_norm.pallas import block_rows, too_wide
from kdk_kernels.rms_norm.pallas_backward import gradients


def _copies(grad: jax.Array, names: Sequence[str], rows: Optional[int], interpret: Any) -> dict[str, jax.Array]:
    """Nothing flowed back to y: the sum passes the gradient of new_residual on, to each input in memory of its own."""
    if not names:
        return {}

    def kernel(source: Any, *copies: Any) -> None:
        for copy in copies:
            copy[...] = source[...]

    H = grad.shape[-1]
    flat = grad.reshape(-1, H)
    rows = block_rows(flat.shape[0], 2 * H, rows)
    tile = pl.BlockSpec((rows, H), lambda i: (i, 0))
    out = pl.pallas_call(
        kernel,
        out_shape=tuple(jax.ShapeDtypeStruct(flat.shape, flat.dtype) for _ in names),
        grid=(pl.cdiv(flat.shape[0], rows),),
        in_specs=[tile],
        out_specs=tuple(tile for _ in names),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=(1 + len(names)) * flat.size * flat.dtype.itemsize
        ),
        interpret=interpret,
    )(flat)
    return {name: copy.reshape(grad.shape) for name, copy in zip(names, out)}


def backward(
    grad_y: Optional[jax.Array],
    grad_new_residual: Optional[jax.Array],
    new_residual: jax.Array,
    weight: jax.Array,
    rstd: jax.Array,
    offset: float,
    needs: str,
    *,
    rows: Optional[int] = None,
    interpret: Any = False,
) -> tuple[Optional[jax.Array], Optional[jax.Array], Optional[jax.Array]]:
    needed = [name for name in ("x", "residual", "weight") if name in needs.split(",")]
    results: dict[str, jax.Array] = {}
    if grad_y is not None:
        results = gradients(grad_y, new_residual, weight, rstd, offset, needed, grad_new_residual, rows, interpret)
    elif grad_new_residual is not None:
        results = _copies(grad_new_residual, [name for name in needed if name != "weight"], rows, interpret)
    return results.get("x"), results.get("residual"), results.get("weight")


def supports(
    target: str,
    grad_y: Any,
    grad_new_residual: Any,
    new_residual: Any,
    weight: Any,
    rstd: Any,
    offset: float,
    needs: str,
    *,
    rows: Optional[int] = None,
) -> str | None:
    """A block holds whole rows; both gradients, the sum and both results stand in VMEM twice, and five float32 blocks of values."""
    return too_wide(target, new_residual.shape[-1], 10 * new_residual.itemsize + 20, rows)
