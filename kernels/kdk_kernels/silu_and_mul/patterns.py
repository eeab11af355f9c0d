"""Plain-torch spellings that silu_and_mul replaces. Each takes (gate, up) and equals the reference in float64."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def functional(gate: Tensor, up: Tensor) -> Tensor:
    """transformers' LlamaMLP and the many gated MLPs like it."""
    return F.silu(gate) * up


def times_sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    """Models that spell swish out."""
    return gate * torch.sigmoid(gate) * up


def swapped(gate: Tensor, up: Tensor) -> Tensor:
    return up * F.silu(gate)


def halves(gate: Tensor, up: Tensor) -> Tensor:
    """One fused gate-and-up projection, as in transformers' Phi3MLP: the operator takes the two halves as they are."""
    first, second = torch.cat((gate, up), dim=-1).chunk(2, dim=-1)
    return second * F.silu(first)


SPELLINGS: tuple[tuple[Callable[..., Tensor], dict[str, Any]], ...] = (
    (functional, {}),
    (times_sigmoid, {}),
    (swapped, {}),
    (halves, {}),
)
"""(function, the scalar arguments with which the operator equals it)."""
