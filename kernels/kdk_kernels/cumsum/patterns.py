"""Plain-torch spellings that cumsum replaces. Each takes x with time last but one and equals the reference."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def functional(x: Tensor) -> Tensor:
    return torch.cumsum(x, dim=-2)


def triangular_product(x: Tensor) -> Tensor:
    """A lower triangle of ones times x, as Mamba-2's chunks and models for chips without a scan have it."""
    T = x.shape[-2]
    return torch.ones(T, T, dtype=x.dtype, device=x.device).tril() @ x


SPELLINGS: tuple[tuple[Callable[..., Tensor], Mapping[str, Any]], ...] = ((functional, {}), (triangular_product, {}))
"""(function, the scalar arguments with which the operator equals it)."""
