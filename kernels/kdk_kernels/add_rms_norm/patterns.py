"""Plain-torch spellings that add_rms_norm replaces. Each takes (x, residual, weight, eps), returns (y, new_residual) and equals
the reference with the given offset.

No `MODULES`: the sum stands at the end of one block and its norm at the start of the next, so the pattern spans modules of a
decoder layer, and replacing one module's forward cannot reach both. Models call the operator themselves.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kdk_kernels.rms_norm import patterns as rms_norm


def functional(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, (h.shape[-1],), weight, eps), h


def llama(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """transformers' decoder layers: hidden_states = residual + hidden_states, then post_attention_layernorm."""
    h = residual + x
    return rms_norm.llama(h, weight, eps), h


def gemma(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same with Gemma's norm: offset 1."""
    h = residual + x
    return rms_norm.gemma(h, weight, eps), h


def sum_in_float32(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Code that adds in float32 and rounds before the norm."""
    h = (x.to(torch.promote_types(x.dtype, torch.float32)) + residual).to(x.dtype)
    return rms_norm.norm_over_root(h, weight, eps), h


SPELLINGS: tuple[tuple[Callable[..., tuple[Tensor, Tensor]], Mapping[str, float]], ...] = (
    (functional, {}),
    (llama, {}),
    (gemma, {"offset": 1.0}),
    (sum_in_float32, {}),
)
"""(function, the scalar arguments with which the operator equals it)."""
