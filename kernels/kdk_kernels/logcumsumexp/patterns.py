"""Plain-torch spellings that logcumsumexp replaces. Each takes x with time last but one and equals the reference."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def functional(x: Tensor) -> Tensor:
    """minGRU's and minLSTM's, and Heinsen's parallel scan (arXiv 2311.06281)."""
    return torch.logcumsumexp(x, dim=-2)


def less_the_largest(x: Tensor) -> Tensor:
    """The largest x of all taken out: right while no x lies far below it."""
    largest = x.amax(dim=-2, keepdim=True)
    return (x - largest).exp().cumsum(dim=-2).log() + largest


SPELLINGS: tuple[tuple[Callable[..., Tensor], Mapping[str, Any]], ...] = ((functional, {}), (less_the_largest, {}))
"""(function, the scalar arguments with which the operator equals it)."""
