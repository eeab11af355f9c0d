"""Plain-torch spellings that rms_norm_dynamic_quant replaces. Each takes (x, weight, eps), returns (q, scale) and equals the
reference with the given scalar arguments, up to elements within rounding of a tie.

No `MODULES`: the norm and the quantisation stand in different modules of a model, the second in its linear layer.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kdk_kernels.rms_norm import patterns as rms_norm


def per_token_int8(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Symmetric, as torchao and LLM.int8 spell it."""
    y = rms_norm.norm_over_root(x.float(), weight.float(), eps)
    scale = y.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
    return torch.round(y / scale).clamp(-127, 127).to(torch.int8), scale.squeeze(-1)


def per_token_float8(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """By the largest value of float8_e4m3fn, multiplied by the inverse."""
    y = rms_norm.norm_over_root(x.float(), weight.float(), eps)
    peak = y.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
    return (y * (448.0 / peak)).clamp(-448, 448).to(torch.float8_e4m3fn), (peak / 448.0).squeeze(-1)


SPELLINGS: tuple[tuple[Callable[..., tuple[Tensor, Tensor]], Mapping[str, Any]], ...] = (
    (per_token_int8, {"dtype": torch.int8}),
    (per_token_float8, {"dtype": torch.float8_e4m3fn}),
)
"""(function, the scalar arguments with which the operator equals it)."""
