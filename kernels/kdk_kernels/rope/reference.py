"""Rotary position embedding in plain PyTorch: what every kernel of this operator is compared with."""

from typing import Optional

import torch
from torch import Tensor

from kdk.errors import InputError

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate the queries and the keys of attention by their positions.

    B sequences, S tokens, Hq query heads, Hk key heads, D elements per head, of which the first R rotate (R <= D).
    Element i of the rotating part turns together with its partner: i + R/2 when the halves are split
    (``interleaved=False``: Llama, Qwen, GPT-NeoX), the other one of (2i, 2i + 1) when they are interleaved
    (``interleaved=True``: GPT-J, GLM)::

        out[first]  = x[first]  * cos[first]  - x[second] * sin[first]
        out[second] = x[second] * cos[second] + x[first]  * sin[second]

    The last D - R elements of every head pass through unchanged. Both members of a pair read their own entry of the
    tables, so tables whose halves differ are honoured, as in transformers' ``x * cos + rotate_half(x) * sin``.

    Args:
        q: queries, (B, S, Hq, D), or (S, Hq, D) without a batch.
        k: keys, (B, S, Hk, D), or (S, Hk, D) without a batch; the dtype of ``q``.
        cos: cosines of the angles, (B or 1, S, R), or (S, R) without a batch; R is even. In the dtype of ``q`` or
            in float32.
        sin: sines, in the shape and dtype of ``cos``.
        interleaved: how the rotating elements pair up.

    Returns:
        q_out, k_out: in the shapes and the dtype of ``q`` and ``k``.

    Raises:
        kdk.errors.InputError: the shapes or dtypes do not fit together.

    Source: Su et al., RoFormer (arXiv:2104.09864), with the pairing of GPT-NeoX and of GPT-J.
    Accuracy: computed in float32 (float64 for float64 inputs) and rounded once. Tables in a 16-bit dtype cost more
    accuracy than the operator does: an angle of a far position is only as good as its table.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def rope_backward(
    grad_q_out: Optional[Tensor],
    grad_k_out: Optional[Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    needs: str,
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """The gradients of ``q`` and ``k``: the transposed rotation of the gradients of the outputs.

    An output to which nothing flowed back (None) gives None for its input. The transposed rotation is the rotation
    whose sines are negated and swapped within each pair.
    """
    cos, sin = cos.unsqueeze(-2), -_swap(sin, interleaved).unsqueeze(-2)
    needed = needs.split(",")
    grad_q = _rotate(grad_q_out, cos, sin, interleaved) if grad_q_out is not None and "q" in needed else None
    grad_k = _rotate(grad_k_out, cos, sin, interleaved) if grad_k_out is not None and "k" in needed else None
    return grad_q, grad_k


def check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
    """Refuse shapes, dtypes and devices that the operator does not take."""


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (..., S, H, D) rotated by tables (..., S, 1, R)."""
    rotary = cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    turning = x[..., :rotary].to(wide)
    first, second = _pairs(turning, interleaved)
    partner = _join(-second, first, interleaved)
    turned = turning * cos.to(wide) + partner * sin.to(wide)
    return torch.cat((turned.to(x.dtype), x[..., rotary:]), dim=-1)


def _swap(table: Tensor, interleaved: bool) -> Tensor:
    first, second = _pairs(table, interleaved)
    return _join(second, first, interleaved)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second members of all pairs, (..., R) -> 2 x (..., R/2)."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _join(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    """The inverse of `_pairs`."""
    if interleaved:
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)
