"""Gradients of the rotary position embedding in NKI: the kernel of the forward, with the transposed rotation."""

from typing import Optional

from torch import Tensor

from kdk_kernels.rope.nki import TUNABLE as TUNABLE
from kdk_kernels.rope.nki import head_too_long, rotate


def backward(
    grad_q_out: Optional[Tensor],
    grad_k_out: Optional[Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    needs: str,
    *,
    elements: Optional[int] = None,
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    needed = needs.split(",")
    grads = [g if name in needed else None for name, g in (("q", grad_q_out), ("k", grad_k_out))]
    given = [g for g in grads if g is not None]
    rotated = iter(rotate(given, cos, sin, interleaved, transposed=True, elements=elements) if given else [])
    grad_q, grad_k = (None if g is None else next(rotated) for g in grads)
    return grad_q, grad_k


def supports(
    target: str,
    grad_q_out: Optional[Tensor],
    grad_k_out: Optional[Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    needs: str,
    *,
    elements: Optional[int] = None,
) -> str | None:
    given = grad_q_out if grad_q_out is not None else grad_k_out
    return None if given is None else head_too_long(given, elements)
