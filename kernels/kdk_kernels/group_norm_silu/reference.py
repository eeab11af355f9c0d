"""group_norm_silu in plain torch: the semantics every kernel is checked against."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from kdk.errors import InputError


def group_norm_silu(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Group normalisation over a group's channels and all pixels, then SiLU.

    z = (x - mean) / sqrt(variance + eps) * weight + bias;  y = z * sigmoid(z)

    mean and variance (of the whole population: divided by the number of elements) are those of an image's group, C / groups
    neighbouring channels. Computed in float32 (float64 for float64) and rounded once; the variance is the mean square of x - mean, so
    that a large mean costs no digits. Semantics: torch.nn.functional.group_norm, then torch.nn.functional.silu.

    Args:
        x: (N, C, ...), images with any number of pixel dimensions; float32, bfloat16, float16 or float64, any strides.
        groups: divides C.
        weight, bias: (C,), the dtype of x, or float32.
        eps: added to the variance; not negative.

    Returns:
        y: like x, contiguous or channels_last (channels_last_3d) like x. (The torch operator also returns mean and rstd:
        (N, groups), float32, saved for backward.)

    Raises:
        kdk.errors.InputError: sizes, dtypes, groups or eps that do not fit.

    Gradients: x, weight and bias. Those of weight and bias are summed over images and pixels in float32 and rounded once.
    """
    f = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = _mean(f, groups)
    centred = f - _per_channel(mean, x)
    rstd = (_mean(centred.square(), groups) + eps).rsqrt()
    z = centred * _per_channel(rstd, x) * _per_channel(weight, x) + _per_channel(bias, x)
    return F.silu(z).to(x.dtype), mean, rstd


def group_norm_silu_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, needs: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `group_norm_silu` with respect to x, weight and bias.

    With n = (x - mean) * rstd, z = n * weight + bias, dz = grad * silu'(z) and g = dz * weight:
    dx = rstd * (g - mean(g) - n * mean(g * n)), means over a group; dweight = sum of dz * n and dbias = sum of dz over images and
    pixels. silu'(z) = sigmoid(z) * (1 + z * sigmoid(-z)).
    """
    needed = needs.split(",")
    grad_x: Optional[Tensor] = None
    grad_weight: Optional[Tensor] = None
    grad_bias: Optional[Tensor] = None
    groups, scale, w = mean.shape[1], _per_channel(rstd, x), _per_channel(weight, x)
    n = (x.to(rstd.dtype) - _per_channel(mean, x)) * scale
    z = n * w + _per_channel(bias, x)
    dz = grad.to(rstd.dtype) * (torch.sigmoid(z) * (1 + z * torch.sigmoid(-z)))
    if "x" in needed:
        g = dz * w
        of_g, of_gn = (_per_channel(_mean(t, groups), x) for t in (g, g * n))
        grad_x = ((g - of_g - n * of_gn) * scale).to(x.dtype)
    if "weight" in needed:
        grad_weight = _sum_per_channel(dz * n).to(weight.dtype)
    if "bias" in needed:
        grad_bias = _sum_per_channel(dz).to(bias.dtype)
    return grad_x, grad_weight, grad_bias  # type: ignore[return-value]


def _mean(t: Tensor, groups: int) -> Tensor:
    """(N, C, ...) -> (N, groups)."""
    return t.reshape(t.shape[0], groups, t.shape[1:].numel() // groups).mean(-1)


def _per_channel(t: Tensor, x: Tensor) -> Tensor:
    """(C,) or, per group, (N, G) in a shape that broadcasts over x (N, C, ...). Element-wise, so that channels-last is kept."""
    if t.dim() == 2:
        t = t.unsqueeze(-1).expand(*t.shape, x.shape[1] // t.shape[1])
        return t.reshape(x.shape[0], x.shape[1], *(1 for _ in x.shape[2:]))
    return t.reshape(-1, *(1 for _ in x.shape[2:]))


def _sum_per_channel(t: Tensor) -> Tensor:
    return t.transpose(0, 1).flatten(1).sum(1)


def check(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> None:
    """Raise InputError unless the arguments are what `group_norm_silu` takes."""
    if x.dim() < 2:
        way_out = "x.unsqueeze(0) for one image"
        raise InputError("GNS-X", "group_norm_silu: the shape of x", value=tuple(x.shape), limit="(N, C, ...)", way_out=way_out)
    C = x.shape[1]
    if groups < 1 or C % groups:
        limit, way_out = f"a divisor of C = {C}", "32 is usual; C for a group per channel, 1 for all channels together"
        raise InputError("GNS-GROUPS", "group_norm_silu: groups", value=groups, limit=limit, way_out=way_out)
    for name, t in (("weight", weight), ("bias", bias)):
        if t.dim() != 1 or t.shape[0] != C:
            problem, limit = f"group_norm_silu: the shape of {name}", f"({C},), the channels of x"
            way_out = "one number per channel: of a norm without them, ones and zeros"
            raise InputError(f"GNS-{name.upper()}", problem, value=tuple(t.shape), limit=limit, way_out=way_out)
    if not eps >= 0:
        raise InputError("GNS-EPS", "group_norm_silu: eps", value=eps, limit="at least 0", way_out="usual values are 1e-5 and 1e-6")
