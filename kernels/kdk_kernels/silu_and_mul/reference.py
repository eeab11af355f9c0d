"""silu_and_mul in plain torch: the semantics every kernel is checked against."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from kdk.errors import InputError


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of a SwiGLU feed-forward block: y = silu(gate) * up, with silu(x) = x * sigmoid(x).

    Computed in float32 (float64 for float64) and rounded once, also where models round silu(gate) before they multiply.
    Semantics: N. Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202), SwiGLU without its projections, with
    torch.nn.functional.silu: the float32 exponential overflows for gates below about -88, where the result is -0 times
    up, and a gate of -inf gives NaN.

    Args:
        gate: (..., H), float32, bfloat16, float16 or float64, any strides: `gate, up = x.chunk(2, -1)` is taken without
            a copy in Triton and NKI; a Pallas kernel takes contiguous arrays only, so there a view is copied first.
        up: shape, dtype and device of gate.

    Returns:
        y: like gate, contiguous.

    Raises:
        kdk.errors.InputError: shapes, dtypes or devices that do not fit.

    Gradients: gate and up. The gate's reads both inputs, the up's reads gate alone.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def silu_and_mul_backward(grad: Tensor, gate: Tensor, up: Optional[Tensor], needs: str) -> tuple[Tensor, Tensor]:
    """Gradients of `silu_and_mul` with respect to gate and up.

    With s = sigmoid(gate): dgate = grad * up * s * (1 + gate * (1 - s)), dup = grad * gate * s.
    """
    names = needs.split(",")
    wide = torch.promote_types(gate.dtype, torch.float32)
    d, g = grad.to(wide), gate.to(wide)
    s = torch.sigmoid(g)
    grad_gate: Optional[Tensor] = None
    grad_up: Optional[Tensor] = None
    if "gate" in names:
        if up is None:
            raise InputError("SILU-UP", "silu_and_mul_backward: up is None", limit="the gradient of gate reads it")
        # sigmoid(-g) and not 1 - s: the difference loses the small values, which g then multiplies.
        slope = s * (1 + g * torch.sigmoid(-g))
        grad_gate = (d * up.to(wide) * slope).to(gate.dtype)
    if "up" in names:
        grad_up = (d * (g * s)).to(gate.dtype)
    return grad_gate, grad_up  # type: ignore[return-value]


def check(gate: Tensor, up: Tensor) -> None:
    """Raise InputError unless the arguments are what `silu_and_mul` takes."""
    if gate.dim() == 0:
        way_out = "gate.reshape(1) for a single number"
        raise InputError("SILU-GATE", "silu_and_mul: the shape of gate", value=tuple(gate.shape), limit="(..., H)", way_out=way_out)
    if up.shape != gate.shape:
        limit = f"gate has {tuple(gate.shape)}; they must be equal"
        way_out = "up.expand(gate.shape) where one up serves several rows"
        raise InputError("SILU-UP", "silu_and_mul: up has another shape", value=tuple(up.shape), limit=limit, way_out=way_out)
