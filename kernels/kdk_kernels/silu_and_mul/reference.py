"""SiLU-and-multiply in plain torch: what every kernel of this folder has to compute."""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from kdk.errors import InputError


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of a SwiGLU feed-forward block: ``y = silu(gate) * up``, with ``silu(x) = x * sigmoid(x)``.

    Shapes: ``gate``, ``up`` and the result are ``(..., H)``, with H the width of the hidden layer.

    Args:
        gate: the projection that opens or closes; any strides, so ``gate, up = x.chunk(2, -1)`` needs no copy.
        up: the projection that passes; shape, dtype and device of ``gate``.

    Returns:
        A contiguous tensor of the inputs' shape and dtype.

    Raises:
        kdk.errors.InputError: no dimension, not a floating-point dtype, or shape, dtype or device differ.

    Semantics: N. Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202), the SwiGLU variant without its projections.
    Accuracy: computed in float32 (float64 for float64) and rounded once. ``exp`` overflows for gates below about -88, where
    the result is -0 times ``up``; a gate of -inf gives NaN, as in ``torch.nn.functional.silu``.
    On a TPU a view is copied first: the kernel language takes contiguous arrays only.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype).contiguous()


def silu_and_mul_backward(
    grad: Tensor, gate: Tensor, up: Optional[Tensor], needs: str
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """Gradients of :func:`silu_and_mul`.

    ``d gate = grad * up * s * (1 + gate * (1 - s))`` and ``d up = grad * gate * s``, with ``s = sigmoid(gate)``.

    Args:
        grad: gradient of the result, ``(..., H)``, any strides.
        gate: the input.
        up: the input; only ``d gate`` reads it.
        needs: the inputs whose gradient is needed: "gate", "up" or "gate,up".

    Returns:
        ``(grad_gate, grad_up)``, contiguous; None where not needed.
    """
    names = needs.split(",")
    wide = torch.promote_types(gate.dtype, torch.float32)
    d, g = grad.to(wide), gate.to(wide)
    s = torch.sigmoid(g)
    grad_gate = grad_up = None
    if "gate" in names:
        if up is None:
            raise InputError("KDK-MISSING", "silu_and_mul_backward: up is None", limit="the gradient of gate reads it")
        # sigmoid(-g) and not 1 - s: the difference loses the small values that g then multiplies.
        slope = s * (1 + g * torch.sigmoid(-g))
        grad_gate = (d * up.to(wide) * slope).to(gate.dtype).contiguous()
    if "up" in names:
        grad_up = (d * (g * s)).to(gate.dtype).contiguous()
    return grad_gate, grad_up


def check(gate: Tensor, up: Tensor) -> None:
    """Refuse what the operator does not take."""
    if gate.dim() == 0:
        raise InputError(
            "KDK-SHAPE",
            "silu_and_mul: gate has no dimension",
            limit="it needs at least one: (..., H)",
            way_out="gate.reshape(1) and up.reshape(1)",
        )
    if not gate.dtype.is_floating_point:
        raise InputError(
            "KDK-DTYPE",
            "silu_and_mul: gate",
            value=gate.dtype,
            limit="a floating-point dtype is needed",
            way_out="gate.float() and up.float()",
        )
    _same("KDK-SHAPE", "shape", tuple(gate.shape), tuple(up.shape), "expand both to one shape")
    _same("KDK-DTYPE", "dtype", gate.dtype, up.dtype, "up.to(gate.dtype)")
    _same("KDK-DEVICE", "device", gate.device, up.device, "up.to(gate.device)")


def _same(code: str, what: str, gate: object, up: object, way_out: str) -> None:
    if gate != up:
        raise InputError(
            code,
            f"silu_and_mul: {what} of gate and up",
            value=f"{gate} and {up}",
            limit="they must be equal",
            way_out=way_out,
        )
