"""rope in plain torch: the semantics every kernel is checked against."""

from typing import Optional

import torch
from torch import Tensor

from kdk.errors import InputError


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate the queries and the keys of attention by their positions.

    B sequences of S tokens, Hq query heads, Hk key heads, D elements per head, of which the first R turn; the last D - R pass
    through unchanged. An element turns together with its partner: i with i + R/2 in the usual, half-split pairing (Llama,
    Qwen, GPT-NeoX), 2i with 2i + 1 in the interleaved one (GPT-J, GLM, Meta's own Llama code):

        out[first]  = x[first]  * cos[first]  - x[second] * sin[first]
        out[second] = x[second] * cos[second] + x[first]  * sin[second]

    Each member of a pair reads its own entry of the tables, as in x * cos + rotate_half(x) * sin of transformers. For the
    interleaved pairing the tables are interleaved too: angles.repeat_interleave(2, -1), where transformers' GLM passes halves.

    Computed in float32 (float64 for float64) and rounded once. Semantics: J. Su et al., "RoFormer" (arXiv 2104.09864). The
    position is as exact as the tables: in bfloat16 they, and not the operator, set the error; float32 tables cost little.

    Args:
        q: (B, S, Hq, D), or (S, Hq, D) without a batch; float32, bfloat16, float16 or float64. Any strides: slices of a fused
            projection are taken without a copy in Triton and NKI; a Pallas kernel takes contiguous arrays only.
        k: (B, S, Hk, D), or (S, Hk, D); dtype and device of q.
        cos: (B or 1, S, R), or (S, R) without a batch; R even, at most D; the dtype of q, or float32.
        sin: shape, dtype and device of cos.
        interleaved: which elements are partners.

    Returns:
        q_out, k_out: like q and k, contiguous.

    Raises:
        kdk.errors.InputError: shapes, dtypes or devices that do not fit.

    Gradients: q and k. Each reads the tables alone.
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
    """Gradients of `rope` with respect to q and k: the transposed rotation, whose sines are swapped within a pair and negated.

    An output that nothing flowed back to (None) gives None for its input.
    """
    cos, sin = cos.unsqueeze(-2), -_swap(sin, interleaved).unsqueeze(-2)
    needed = needs.split(",")
    grad_q = _rotate(grad_q_out, cos, sin, interleaved) if grad_q_out is not None and "q" in needed else None
    grad_k = _rotate(grad_k_out, cos, sin, interleaved) if grad_k_out is not None and "k" in needed else None
    return grad_q, grad_k


def check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
    """Raise InputError unless the arguments are what `rope` takes."""
    if q.dim() not in (3, 4):
        limit, way_out = "(B, S, Hq, D) or (S, Hq, D)", "q.unsqueeze(-2) where there is one head and no dimension for it"
        raise InputError("ROPE-Q", "rope: the shape of q", value=tuple(q.shape), limit=limit, way_out=way_out)
    if k.dim() != q.dim() or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
        limit = f"q is {tuple(q.shape)}; only the number of heads, the last but one, may differ"
        way_out = "rotate them in two calls where they have other positions"
        raise InputError("ROPE-K", "rope: k does not fit q", value=tuple(k.shape), limit=limit, way_out=way_out)
    _check_tables(q, cos, sin)


def _check_tables(q: Tensor, cos: Tensor, sin: Tensor) -> None:
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        value = f"{cos.dtype} {tuple(cos.shape)} and {sin.dtype} {tuple(sin.shape)}"
        way_out = "make both of the same angles: angles.cos(), angles.sin()"
        raise InputError("ROPE-TABLES", "rope: cos and sin differ", value=value, limit="one shape and dtype", way_out=way_out)
    if cos.dim() != q.dim() - 1 or cos.shape[-2] != q.shape[-3] or (q.dim() == 4 and cos.shape[0] not in (1, q.shape[0])):
        batch = f"{q.shape[0]} or 1" if q.shape[0] != 1 else "1"
        limit = (f"({batch}, {q.shape[1]}, R)" if q.dim() == 4 else f"({q.shape[0]}, R)") + f" for q {tuple(q.shape)}"
        shared = q.dim() == 4 and cos.dim() == 2
        way_out = "unsqueeze(0) a table that all sequences share" if shared else "one row of the tables per token"
        raise InputError("ROPE-TABLES", "rope: cos and sin do not fit q", value=tuple(cos.shape), limit=limit, way_out=way_out)
    if cos.shape[-1] % 2 or cos.shape[-1] > q.shape[-1]:
        limit = f"R, their last dimension, is even and at most D = {q.shape[-1]}"
        way_out = "every element that turns has an entry of its own: torch.cat((half, half), -1) makes a table from half a table"
        raise InputError("ROPE-R", "rope: the size of cos and sin", value=cos.shape[-1], limit=limit, way_out=way_out)


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
