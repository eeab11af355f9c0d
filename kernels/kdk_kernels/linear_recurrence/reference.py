"""linear_recurrence in plain torch: the semantics every kernel is checked against."""

from typing import Optional

import torch
from torch import Tensor

from kdk.errors import InputError

STEPS = 256  # one after the other; a longer sequence is cut into parts of this length, which go side by side


def linear_recurrence(a: Tensor, b: Tensor, h0: Optional[Tensor] = None, reverse: bool = False) -> Tensor:
    """The linear recurrence h_t = a_t * h_{t-1} + b_t along time, for every channel by itself.

    The state-space and gated layers of S5, RG-LRU (Griffin), minGRU, HGRN and SRU are this, each with an a and b of its own.

    N sequences of T steps of D channels. Time is the last dimension but one, as in these models: channels lie side by side in
    memory, so that all of them take a step together, and the batch is whatever stands before. For time in another place,
    x.movedim(dim, -2): a view, which Triton reads as it is.

    The state is float32 (float64 for float64) whatever the dtype, and h is rounded once, as it is written: what is carried on is not.
    Nothing is divided, so any a goes: 0 forgets, 1 adds up, |a| > 1 grows until it overflows. An implementation may group the
    steps: h differs from the one taken step by step by roundings of float32, of the largest state on the way.

    Infinities and NaN are those of the recurrence taken step by step, up to 256 steps. A longer sequence may be cut into parts: the
    state passes a part as the product of its factors times the state, plus what the part makes of 0. Where such a product overflows
    (|a| > 1, for long), the states after the part are infinite or NaN, even if step by step they would be finite; where one
    underflows to 0, an infinite state that enters the part leaves it as NaN, not infinite. A NaN stays one.

    Args:
        a: (..., T, D), float32, bfloat16, float16 or float64, any strides. In 16 bits a factor near 1 is coarse (0.996 is the
            last bfloat16 before it): a may be float32 where b has 16 bits.
        b: (..., T, D), the dtype of a; where a is float32, any of these.
        h0: (..., D), the state before the first step, or None for zeros; the dtype of b, or float32.
        reverse: time runs backwards: h_t = a_t * h_{t+1} + b_t, and h0 is the state after the last step.

    Returns:
        h: (..., T, D), the dtype of b, contiguous.

    Raises:
        kdk.errors.InputError: shapes, dtypes or devices that do not fit.

    Gradients: a, b and h0. b's is the recurrence of grad in the other direction, g_t = a_{t+1} * g_{t+1} + grad_t; a's is
    g_t * h_{t-1}, with h as it was stored; h0's is a_1 * g_1.
    """
    wide = torch.promote_types(b.dtype, torch.float32)
    factor, term = a.to(wide), b.to(wide)
    start = torch.zeros_like(term[..., :1, :].sum(-2)) if h0 is None else h0.to(wide)
    return scan(factor, term, start, reverse).to(b.dtype)


def linear_recurrence_backward(
    grad: Tensor, a: Tensor, h: Optional[Tensor], h0: Optional[Tensor], reverse: bool, needs: str
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """Gradients of `linear_recurrence` with respect to a, b and h0.

    h is read for a's alone. h0 is None where there was none.
    """
    wide, needed = torch.promote_types(grad.dtype, torch.float32), needs.split(",")
    factor, g = a.to(wide), grad.to(wide)
    none = torch.zeros_like(g[..., :1, :].sum(-2))
    g = scan(_before(factor, none, not reverse), g, none, not reverse)
    first = slice(-1, None) if reverse else slice(1)
    da, dh0 = None, None
    if "a" in needed and h is not None:
        da = (g * _before(h.to(wide), none if h0 is None else h0.to(wide), reverse)).to(a.dtype)
    if "h0" in needed and h0 is not None:
        dh0 = (factor[..., first, :] * g[..., first, :]).sum(-2).to(h0.dtype)
    return da, g.to(grad.dtype) if "b" in needed else None, dh0


def fake(a: Tensor, b: Tensor, h0: Optional[Tensor] = None, reverse: bool = False) -> Tensor:
    """The result without its loop over time: tracing that would fix T."""
    return torch.empty_like(b)


def fake_backward(
    grad: Tensor, a: Tensor, h: Optional[Tensor], h0: Optional[Tensor], reverse: bool, needs: str
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    needed = needs.split(",")
    da = torch.empty_like(a) if "a" in needed and h is not None else None
    dh0 = torch.empty_like(h0) if "h0" in needed and h0 is not None else None
    return da, torch.empty_like(grad) if "b" in needed else None, dh0


def check(a: Tensor, b: Tensor, h0: Optional[Tensor] = None, reverse: bool = False) -> None:
    """Raise InputError unless the arguments are what `linear_recurrence` takes."""
    check_time("linear_recurrence", "b", b)
    if a.shape != b.shape:
        limit, way_out = f"that of b, {tuple(b.shape)}", "a.expand_as(b) where channels or steps share a factor: no copy in Triton"
        raise InputError("RECURRENCE-A", "linear_recurrence: the shape of a", value=tuple(a.shape), limit=limit, way_out=way_out)
    if h0 is not None and (h0.dim() != b.dim() - 1 or h0.shape[:-1] != b.shape[:-2] or h0.shape[-1] != b.shape[-1]):
        limit, way_out = f"that of b without time, {(*b.shape[:-2], b.shape[-1])}", "h0.expand(...) where sequences share a state"
        raise InputError("RECURRENCE-H0", "linear_recurrence: the shape of h0", value=tuple(h0.shape), limit=limit, way_out=way_out)


def check_time(name: str, argument: str, x: Tensor) -> None:
    """Raise InputError unless a tensor has time and channels."""
    if x.dim() < 2:
        what, way_out = f"{name}: the shape of {argument}", f"{argument}.unsqueeze(-1) where there is one channel and no dimension for it"
        raise InputError("RECURRENCE-SHAPE", what, value=tuple(x.shape), limit="(..., T, D), time before channels", way_out=way_out)


def scan(a: Tensor, b: Tensor, h: Tensor, reverse: bool = False) -> Tensor:
    """The states (..., T, D) of the recurrence from h (..., D) on, in the dtype of the arguments."""
    if reverse:
        return scan(a.flip(-2), b.flip(-2), h).flip(-2)
    T = b.shape[-2]
    if T > STEPS:
        return _scan_parts(a, b, h, T // STEPS * STEPS)
    if T == 0:  # no step, and yet a function of all arguments
        return torch.addcmul(b, a, h.unsqueeze(-2))
    states = []
    for factor, term in zip(a.unbind(-2), b.unbind(-2)):
        h = torch.addcmul(term, factor, h)
        states.append(h)
    return torch.stack(states, -2)


def _scan_parts(a: Tensor, b: Tensor, h: Tensor, whole: int) -> Tensor:
    """Of every part of STEPS steps first what it makes of any state, then from the states between the parts all in between."""
    parts, rest = (t[..., :whole, :].unflatten(-2, (-1, STEPS)) for t in (a, b)), (a[..., whole:, :], b[..., whole:, :])
    factors, terms = parts
    none = torch.zeros_like(terms[..., 0, :])
    ends = scan(factors.prod(-2), scan(factors, terms, none)[..., -1, :], h)
    states = scan(factors, terms, _before(ends, h, False)).flatten(-3, -2)
    return torch.cat((states, scan(*rest, ends[..., -1, :])), -2)


def _before(x: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """What x (..., T, D) was a step earlier: `first` (..., D), then all but the last one."""
    first = first.unsqueeze(-2)
    if reverse:
        return torch.cat((x, first), -2)[..., 1:, :]
    return torch.cat((first, x), -2)[..., :-1, :]
