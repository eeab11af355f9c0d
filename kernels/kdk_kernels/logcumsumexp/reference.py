"""logcumsumexp in plain torch: the semantics every kernel is checked against."""

import torch
from torch import Tensor

from kdk_kernels.linear_recurrence.reference import check_time, scan


def logcumsumexp(x: Tensor) -> Tensor:
    """Logarithms of sums over time from the start to every step, y_t = log(exp(x_1) + ... + exp(x_t)).

    torch.logcumsumexp(x, -2). Time is the last dimension but one, as in `linear_recurrence`; with cumsum(log a) it is that
    recurrence in log space for positive a and b, as minGRU and minLSTM write it.

    The largest x so far is taken out of every sum: nothing overflows. An x of -inf adds nothing; where all so far are -inf, y
    is. Computed in float32 (float64 for float64), rounded once.

    Args:
        x: (..., T, D), float32, bfloat16, float16 or float64, any strides.

    Returns:
        y: like x, contiguous.

    Raises:
        kdk.errors.InputError: an x without time and channels.

    Gradient: dx_t = the sum over s >= t of grad_s * exp(x_t - y_s), by the reversed recurrence of factors exp(y_t - y_{t+1}),
    none above 1. It reads y as it was stored: in 16 bits it is no more exact than y. Zero where x is -inf;
    with kdk.use("reference") and under torch.func the gradient is torch's, which is NaN where all so far are -inf.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32)).logcumsumexp(-2).to(x.dtype)


def logcumsumexp_backward(grad: Tensor, x: Tensor, y: Tensor, needs: str) -> Tensor:
    """Gradient of `logcumsumexp`. Infinite y become the largest number, so that the difference of two equal ones is 0."""
    wide = torch.promote_types(x.dtype, torch.float32)
    largest = torch.finfo(wide).max
    total = y.to(wide).clamp(-largest, largest)
    later = torch.cat((total[..., 1:, :], total[..., -1:, :]), -2)
    g = scan((total - later).exp(), grad.to(wide), torch.zeros_like(total[..., :1, :].sum(-2)), reverse=True)
    return (g * (x.to(wide) - total).exp()).to(x.dtype)


def fake_backward(grad: Tensor, x: Tensor, y: Tensor, needs: str) -> Tensor:
    """The gradient without its loop over time: tracing that would fix T."""
    return torch.empty_like(x)


def check(x: Tensor) -> None:
    """Raise InputError unless x is what `logcumsumexp` takes."""
    check_time("logcumsumexp", "x", x)
