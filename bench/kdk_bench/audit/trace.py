"""What a capture holds: tensors by number, calls in order, steps, and groups of equal calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

PHASES = ("forward", "backward", "optimiser")


@dataclass(frozen=True)
class Ref:
    """A tensor among the arguments of a call: the number of its value."""

    number: int


@dataclass(frozen=True)
class Meta:
    """What a tensor is. dtype: "float32"; layout: contiguous, channels_last, strided, or sparse's own name."""

    dtype: str
    shape: tuple[int, ...]
    layout: str

    def __str__(self) -> str:
        suffix = "" if self.layout == "contiguous" else f" {self.layout}"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{suffix}"


@dataclass(frozen=True)
class Call:
    """One call of an operator below autograd.

    op, overload: "aten::mm", "default". function: the torch function that the model called, where it is a composite ("").
    outputs: numbers of the values; a value that is changed in place gets a new number. bytes: read and written, views none.
    children: the operators that a composite of several kernels is made of, where the dispatcher has such a kernel.
    """

    number: int
    op: str
    overload: str
    phase: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...]
    module: str
    line: str
    function: str
    seconds: float
    bytes: int
    flops: int
    view: bool
    metas: tuple[Meta, ...]
    children: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """ "aten::add.Tensor"; the default overload has no suffix."""
        return self.op if self.overload == "default" else f"{self.op}.{self.overload}"

    def inputs(self) -> Iterator[int]:
        return refs((self.args, self.kwargs))


def refs(value: Any) -> Iterator[int]:
    """The numbers of all tensors in nested arguments, in order."""
    if isinstance(value, Ref):
        yield value.number
    elif isinstance(value, list | tuple):
        for item in value:
            yield from refs(item)
    elif isinstance(value, Mapping):
        yield from refs(list(value.values()))


@dataclass
class Step:
    """One run of forward (backward, optimiser). inputs: what it was given. live_peak: most bytes alive at once; 0: not watched."""

    inputs: tuple[Meta, ...]
    calls: list[Call] = field(default_factory=list)
    live_peak: int = 0
    seconds: float = 0.0


@dataclass
class Event:
    """Something seen while the model ran that is no operator: a redirected request for a device, a raw kernel launch ..."""

    kind: str
    text: str
    line: str
    count: int = 1


@dataclass
class Capture:
    """Everything one audit saw. graph: the calls of the first step, whose tensors are in `tensors` as far as they were kept.
    real: the same model at its real size, on tensors without data."""

    how: str
    steps: list[Step] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    metas: dict[int, Meta] = field(default_factory=dict)
    tensors: dict[int, Any] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    forward_only: bool = False
    graph_breaks: str = ""
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    error: str = ""
    real: Capture | None = None

    @property
    def graph(self) -> list[Call]:
        return self.steps[0].calls if self.steps else []

    def event(self, kind: str, text: str, line: str, count: int = 1) -> None:
        for old in self.events:
            if (old.kind, old.text, old.line) == (kind, text, line):
                old.count += count
                return
        self.events.append(Event(kind, text, line, count))


@dataclass
class Group:
    """Equal calls of one step: the same operator, phase, dtypes, shapes and layouts. count, bytes, flops, seconds: per step."""

    op: str
    overload: str
    phase: str
    metas: tuple[Meta, ...]
    count: int = 0
    bytes: int = 0
    flops: int = 0
    seconds: float = 0.0
    view: bool = False
    modules: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    children: tuple[str, ...] = ()
    example: Call | None = None

    @property
    def name(self) -> str:
        return self.op if self.overload == "default" else f"{self.op}.{self.overload}"


def groups(steps: Iterable[Step]) -> list[Group]:
    """The groups of all steps, each with its figures from the step in which it occurs most (the last of several equal ones)."""
    best: dict[tuple[Any, ...], Group] = {}
    for step in steps:
        mine: dict[tuple[Any, ...], Group] = {}
        for call in step.calls:
            key = (call.op, call.overload, call.phase, call.metas)
            group = mine.setdefault(key, Group(call.op, call.overload, call.phase, call.metas, view=call.view, example=call))
            _count(group, call)
        for key, group in mine.items():
            if key not in best or group.count >= best[key].count:
                best[key] = group
    return list(best.values())


def _count(group: Group, call: Call) -> None:
    group.count += 1
    group.bytes += call.bytes
    group.flops += call.flops
    group.seconds += call.seconds
    group.children = group.children or call.children
    for seen, value in ((group.modules, call.module), (group.lines, call.line), (group.functions, call.function)):
        if value not in seen:
            seen.append(value)
