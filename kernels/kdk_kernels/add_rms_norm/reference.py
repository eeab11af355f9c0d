"""add_rms_norm in plain torch: the semantics every kernel is checked against."""

from typing import Optional

import torch
from torch import Tensor

from kdk.errors import InputError
from kdk.rounding import as_stored
from kdk_kernels.rms_norm.reference import rms_norm, rms_norm_backward


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a block's result to the residual stream and normalise the sum for the next block.

    new_residual = x + residual
    y = new_residual / sqrt(mean(new_residual^2) + eps) * (offset + weight)

    The sum is rounded once to the dtype of x, and the rounded sum is normalised: y equals rms_norm(new_residual, ...), as in
    transformers' decoder layers and vLLM's fused_add_rms_norm. Everything else is computed in float32 (float64 for float64)
    and rounded once. Semantics of the normalisation: torch.nn.functional.rms_norm; offset=1 is Gemma's (1 + weight).

    Args:
        x: (..., H), float32, bfloat16, float16 or float64, any strides.
        residual: shape, dtype and device of x, any strides.
        weight: (H,), the dtype of x, or float32.
        eps: added to the mean square; not negative.
        offset: added to the weight.

    Returns:
        y, new_residual: like x, contiguous. (The torch operator also returns rstd: (...), float32, saved for backward.)

    Raises:
        kdk.errors.InputError: sizes, dtypes, devices or eps that do not fit.

    Gradients: x and residual, which have the same values, and weight. The sum of the two gradients that meet in the residual
    stream is formed in float32 and rounded once; the weight's is summed over all rows in float32 and rounded once to the
    weight's dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) + residual.to(wide)
    y, rstd = rms_norm(as_stored(total, x.dtype), weight, eps, offset)
    return y.to(x.dtype), total.to(x.dtype), rstd


def add_rms_norm_backward(
    grad_y: Optional[Tensor],
    grad_new_residual: Optional[Tensor],
    new_residual: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    needs: str,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """Gradients of `add_rms_norm` with respect to x, residual and weight.

    Those of x and residual are one: the gradient of rms_norm at new_residual plus grad_new_residual. Without grad_y (None) the
    weight has none.
    """
    needed = needs.split(",")
    grad_sum: Optional[Tensor] = None
    grad_weight: Optional[Tensor] = None
    if grad_y is not None:
        of_norm = [name for name, used in (("x", _of_sum(needed)), ("weight", "weight" in needed)) if used]
        grad_sum, grad_weight = rms_norm_backward(
            grad_y, new_residual.to(rstd.dtype), weight, rstd, offset, ",".join(of_norm)
        )
    if grad_new_residual is not None and _of_sum(needed):
        grad_sum = grad_new_residual if grad_sum is None else grad_sum + grad_new_residual.to(rstd.dtype)
    if grad_sum is not None:
        grad_sum = grad_sum.to(new_residual.dtype)
    return grad_sum if "x" in needed else None, grad_sum if "residual" in needed else None, grad_weight


def _of_sum(needed: list[str]) -> bool:
    return "x" in needed or "residual" in needed


def check(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, op: str = "add_rms_norm") -> None:
    """Raise InputError unless the arguments are what `add_rms_norm` takes."""
    if x.dim() == 0:
        way_out = "x.reshape(1) for a single number"
        raise InputError("ADDRMS-X", f"{op}: the shape of x", value=tuple(x.shape), limit="(..., H)", way_out=way_out)
    if residual.shape != x.shape:
        limit = f"x is {tuple(x.shape)}"
        way_out = "residual.expand(x.shape) where one residual serves several rows"
        problem = f"{op}: residual has another shape"
        raise InputError("ADDRMS-RESIDUAL", problem, value=tuple(residual.shape), limit=limit, way_out=way_out)
    if weight.shape != x.shape[-1:]:
        limit, way_out = f"({x.shape[-1]},), the last dimension of x", "a weight with one number per column"
        problem = f"{op}: the shape of weight"
        raise InputError("ADDRMS-WEIGHT", problem, value=tuple(weight.shape), limit=limit, way_out=way_out)
    if not eps >= 0:
        way_out = "usual values are 1e-5 and 1e-6"
        raise InputError("ADDRMS-EPS", f"{op}: eps", value=eps, limit="at least 0", way_out=way_out)
