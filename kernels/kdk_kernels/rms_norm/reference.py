"""rms_norm in plain torch: the semantics every kernel is checked against."""

from typing import Optional

import torch
from torch import Tensor

from kdk.errors import InputError


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Root-mean-square normalisation over the last dimension.

    y = x / sqrt(mean(x^2) + eps) * (offset + weight)

    Computed in float32 (float64 for float64) and rounded once, also where transformers rounds the normalised value before
    it multiplies by the weight. Semantics: torch.nn.functional.rms_norm; offset=1 is Gemma's (1 + weight).

    Args:
        x: (..., H), float32, bfloat16, float16 or float64, any strides.
        weight: (H,), the dtype of x, or float32.
        eps: added to the mean square; not negative.
        offset: added to the weight.

    Returns:
        y: like x, contiguous. (The torch operator also returns rstd: (...), float32, saved for backward.)

    Raises:
        kdk.errors.InputError: sizes, dtypes or eps that do not fit.

    Gradients: x and weight. The weight's is summed over all rows in float32 and rounded once to the weight's dtype.
    """
    f = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = (f.square().mean(-1) + eps).rsqrt()
    return (f * rstd.unsqueeze(-1) * (weight.to(f.dtype) + offset)).to(x.dtype), rstd


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, needs: str
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm` with respect to x and weight.

    With n = x * rstd and g = grad * (offset + weight): dx = rstd * (g - n * mean(g * n)), dweight = sum over rows of grad * n.
    """
    needed = needs.split(",")
    g, n = grad.to(rstd.dtype), x.to(rstd.dtype) * rstd.unsqueeze(-1)
    grad_x: Optional[Tensor] = None
    grad_weight: Optional[Tensor] = None
    if "x" in needed:
        gw = g * (weight.to(rstd.dtype) + offset)
        grad_x = ((gw - n * (gw * n).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)).to(x.dtype)
    if "weight" in needed:
        grad_weight = (g * n).reshape(-1, n.shape[-1]).sum(0).to(weight.dtype)
    return grad_x, grad_weight  # type: ignore[return-value]


def check(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, op: str = "rms_norm") -> None:
    """Raise InputError unless the arguments are what `rms_norm` takes."""
    if x.dim() == 0:
        way_out = "x.reshape(1) for a single number"
        raise InputError("RMS-X", f"{op}: the shape of x", value=tuple(x.shape), limit="(..., H)", way_out=way_out)
    if weight.shape != x.shape[-1:]:
        limit = f"({x.shape[-1]},), the last dimension of x"
        way_out = "a weight with one number per column"
        raise InputError("RMS-WEIGHT", f"{op}: the shape of weight", value=tuple(weight.shape), limit=limit, way_out=way_out)
    if not eps >= 0:
        raise InputError("RMS-EPS", f"{op}: eps", value=eps, limit="at least 0", way_out="usual values are 1e-5 and 1e-6")
