"""Plain-torch spellings that rms_norm replaces. Each takes (x, weight, eps) and equals the reference with the given offset."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def functional(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """transformers' LlamaRMSNorm and the many copies of it."""
    hidden = x.to(torch.promote_types(x.dtype, torch.float32))
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return weight * (hidden * torch.rsqrt(variance + eps)).to(x.dtype)


def norm_over_root(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """transformers' GemmaRMSNorm: offset 1."""
    hidden = x.to(torch.promote_types(x.dtype, torch.float32))
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return (hidden * (1.0 + weight.to(hidden.dtype))).to(x.dtype)


SPELLINGS: tuple[tuple[Callable[..., Tensor], Mapping[str, float]], ...] = ((functional, {}), (llama, {}), (norm_over_root, {}), (gemma, {"offset": 1.0}))
"""(function, the scalar arguments with which the operator equals it)."""
