"""What an operator's peers.py says: the same operator by others, which `kdk bench` times beside kdk's. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Peer:
    """A contender. function: takes the operator's arguments, gives its outputs (not the saved tensors), is differentiable by
    autograd; it imports its package inside. package: the distribution that it needs. platforms: where it runs; empty: everywhere.
    refuse: why it does not take these arguments, or None.
    """

    name: str
    function: Callable[..., Any]
    package: str = "torch"
    platforms: tuple[str, ...] = ()
    refuse: Callable[..., str | None] = lambda *args: None
