"""cumsum in plain torch: the semantics every kernel is checked against."""

import torch
from torch import Tensor

from kdk_kernels.linear_recurrence.reference import check_time


def cumsum(x: Tensor) -> Tensor:
    """Sums over time from the start to every step, y_t = x_1 + ... + x_t, in float32.

    torch.cumsum(x, -2). Time is the last dimension but one, as in `linear_recurrence`, of which this is the case a = 1. For another
    dimension, cumsum(x.movedim(dim, -2)).movedim(-2, dim); for the last one, cumsum(x.unsqueeze(-1)).squeeze(-1) does no copy.

    Added up in float32 (float64 for float64), in groups, so that the error grows slower than with T; rounded once, as y is
    written. In 16 bits a sum of many small terms still ends where the next term is less than half a step of the dtype: pass
    float32.

    Args:
        x: (..., T, D), float32, bfloat16, float16 or float64, any strides.

    Returns:
        y: like x, contiguous.

    Raises:
        kdk.errors.InputError: an x without time and channels.

    Gradient: the sums over time from the end.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32)).cumsum(-2).to(x.dtype)


def cumsum_backward(grad: Tensor, needs: str) -> Tensor:
    """Gradient of `cumsum`: the sums from the end to every step."""
    return grad.to(torch.promote_types(grad.dtype, torch.float32)).flip(-2).cumsum(-2).flip(-2).to(grad.dtype)


def check(x: Tensor) -> None:
    """Raise InputError unless x is what `cumsum` takes."""
    check_time("cumsum", "x", x)
