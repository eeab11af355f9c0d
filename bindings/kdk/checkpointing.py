"""Activation checkpointing recomputes after the context that chose an implementation has ended: keep the choice with it.

torch.utils.checkpoint saves random state and autocast, has no hook for a user's state, and every caller goes through these
two places. Both are private names of torch; tests/torch hold a test for each kind of checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from kdk.selection import bind


def keep_the_choice() -> None:
    """Wrap both kinds of checkpoint, once."""
    reentrant = torch_checkpoint.CheckpointFunction.forward
    other = torch_checkpoint._checkpoint_without_reentrant_generator
    if hasattr(other, "_kdk"):
        return

    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return reentrant(ctx, bind(run_function), *args)

    @functools.wraps(other)
    def without_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return other(bind(function), *args, **kwargs)

    without_reentrant._kdk = True  # type: ignore[attr-defined]
    torch_checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    torch_checkpoint._checkpoint_without_reentrant_generator = without_reentrant  # type: ignore[assignment]
