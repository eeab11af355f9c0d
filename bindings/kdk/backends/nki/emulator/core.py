"""What one NeuronCore holds while a kernel runs on it. One per thread, so two threads can simulate at the same time."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import CHECKS, refuse

if TYPE_CHECKING:
    from .cost.records import Record
    from .lnc import Pair
    from .memory import Memory, Placement

TARGETS = {"trn1": 2, "inf2": 2, "gen2": 2, "trn2": 3, "gen3": 3, "trn3": 4, "gen4": 4}
DEFAULT_TARGET = "trn2"
TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
FRONTENDS = ("tracer", "parser")


def generation_of(target: str | None) -> int:
    """The NeuronCore generation of a target; without one, of the environment, else of trn2."""
    name = target or os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET
    if name not in TARGETS:
        refuse("generation", f"unknown target {name!r}, known: {', '.join(TARGETS)}")
    return TARGETS[name]


@dataclass
class Loop:
    """A dynamic loop being run. The hardware has one copy of its body, so every iteration must look like the first."""

    site: str
    iterations: int = 0
    signature: list[tuple] | None = None


@dataclass
class Core:
    """State of one core: the trace, what is allocated, the accumulators, the loops that are open."""

    generation: int
    index: int = 0
    grid: int = 0  # 0: launched without a grid
    data: bool = True
    frontend: str = "tracer"
    pair: Pair | None = None
    trace: list[Record] = field(default_factory=list)
    tiles: list[Placement] = field(default_factory=list)
    writers: dict[Placement, int] = field(default_factory=dict)  # last writer and readers since, for the timeline
    readers: dict[Placement, list[int]] = field(default_factory=dict)
    arenas: dict[Any, Memory] = field(default_factory=dict)
    accumulators: dict[str, tuple[Any, Any, str] | None] = field(default_factory=dict)
    loops: list[int] = field(default_factory=list)
    loop_spans: list[list[tuple[int, int]]] = field(default_factory=list)  # per open iteration: instructions of inner ones
    loop_count: int = 0
    trips: list[tuple[str, int]] = field(default_factory=list)  # dynamic loops run, with their iterations
    no_reorder: int = 0
    shared_count: int = 0
    lints: dict[str, list[str]] = field(default_factory=dict)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    random_state: dict[str, np.ndarray] = field(default_factory=dict)

    def lint(self, text: str, site: str) -> None:
        """Note something legal but slow, once per text and line."""
        sites = self.lints.setdefault(f"[{CHECKS['lint'].code}] {text}", [])
        if site not in sites:
            sites.append(site)


_local = threading.local()


def running() -> Core | None:
    """The core of this thread, or None outside a simulation."""
    return getattr(_local, "core", None)


def current() -> Core:
    core = running()
    if core is None:
        raise RuntimeError("NKI calls only work inside a kernel: use nki.simulate(kernel)(...)")
    return core


def generation() -> int:
    """Of the running core; outside a kernel, of the environment's target. For constants that modules read at import."""
    core = running()
    return core.generation if core is not None else generation_of(None)


def enter(core: Core | None) -> None:
    _local.core = core
