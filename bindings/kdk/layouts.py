"""Memory formats of results. Every result is contiguous, except where `Op.layouts` says that channels_last is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def format_of(t: Tensor) -> torch.memory_format:
    """channels_last (_3d) for a dense tensor of 4 (5) dimensions in that order, contiguous for every other."""
    last = CHANNELS_LAST.get(t.dim())
    if last is None or t.is_contiguous() or not t.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def promised(args: tuple[Any, ...]) -> tuple[int, torch.memory_format]:
    """For an operator that keeps layouts: results of this rank have this format, all others are contiguous."""
    for a in args:
        if isinstance(a, Tensor) and a.dim() in CHANNELS_LAST:
            return a.dim(), format_of(a)
    return 0, torch.contiguous_format


def format_for(t: Tensor, rank: int, kept: torch.memory_format) -> torch.memory_format:
    """The format that a result has, by what `promised` said."""
    return kept if t.dim() == rank else torch.contiguous_format
