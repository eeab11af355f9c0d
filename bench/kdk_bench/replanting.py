"""Likely causes that show when the same fault is planted in the oracle: in the calls of torch that the reference is made of.

A kernel's sum that lost its last tile gives what the reference gives if its own sum leaves that tile out. So every call of the
reference is changed in every way that a kernel may be wrong in, one at a time, and what comes out is held against the output.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from kdk_bench.hypotheses import Case, Finding
from kdk_bench.rereading import parts, rounded, run_reference

MOST_WORK = 2**28
"""Elements that the runs of the reference may compute which a diagnosis is made of: a second or two."""
A_CALL = 2**15
"""As many elements as a call of torch costs, however small its tensors are."""
HERE = (str(Path(torch.__file__).parent), __file__)
EMPTY = {"sum": 0.0, "mean": 0.0, "amax": -torch.inf, "max": -torch.inf, "amin": torch.inf, "min": torch.inf, "prod": 1.0}
EMPTY |= {"logsumexp": -torch.inf, "_softmax": -torch.inf, "_log_softmax": -torch.inf, "mm": 0.0, "bmm": 0.0, "cumsum": 0.0}
"""What counts for nothing, of the calls that reduce their first operand."""
OTHER = {"mul": "div", "div": "mul", "add": "sub", "sub": "add", "amax": "amin", "amin": "amax", "sum": "amax"}
OTHER |= {"rsqrt": "sqrt", "sqrt": "rsqrt", "exp": "exp2"}
CLOSE = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Site:
    """A call in the reference's code: all passes through it, where it stands in a loop. path: who calls whom, up to it."""

    line: str
    path: tuple[tuple[str, int], ...]
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.line})"


@dataclass
class Call:
    """The arguments of the first pass through a site, how many passes there are, and the elements that all of them read and make."""

    func: Any
    leaves: list[Any]
    passes: int = 0
    elements: int = 0


@dataclass(frozen=True)
class Planted:
    """One way in which a call may have gone wrong."""

    site: Site
    cause: str
    details: str
    run: Run


class _Recorded(TorchDispatchMode):
    """Notes every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Site, Call] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        site = _site(func)
        if site not in self.calls:
            leaves = [t.detach() if isinstance(t, Tensor) else t for t in tree_flatten(args)[0]]
            self.calls[site] = Call(func, leaves)
        call = self.calls[site]
        call.passes += 1
        call.elements += sum(t.numel() for t in tree_flatten((args, result))[0] if isinstance(t, Tensor))
        return result


class _Changed(TorchDispatchMode):
    """Runs one call in another way."""

    def __init__(self, planted: Planted) -> None:
        super().__init__()
        self.planted = planted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _site(func) != self.planted.site:
            return func(*args, **(kwargs or {}))
        return self.planted.run(func, args, kwargs or {})


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _site(func: Any) -> Site:
    line, path = "", []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not run_reference.__code__:
        name = frame.f_code.co_filename
        if not name.startswith(HERE):
            line = line or f"{Path(name).name}:{frame.f_lineno}"
            path.append((name, frame.f_lasti))
        frame = frame.f_back
    return Site(line, tuple(path), _name(func))


def planted(case: Case) -> Finding | None:
    """The first change of the reference whose result the output is, in the region that is wrong."""
    recorded = _Recorded()
    if run_reference(case, {}, recorded) is None:
        return None
    region = case.inside()
    work = sum(call.elements + A_CALL * call.passes for call in recorded.calls.values())
    for _, way in zip(range(MOST_WORK // max(1, work)), _ways(recorded.calls, case)):
        h = run_reference(case, {}, _Changed(way))
        if h is not None and case.explains(h, region):
            return way.cause, f"the output is that of the reference if in {way.site} {way.details}"
    return None


def _ways(calls: dict[Site, Call], case: Case) -> Iterator[Planted]:
    """A reduction first, then what is read from where, what is computed, and last the rounding, which can tip a comparison too."""
    for kind in (_lost, _misread, _compared, _miscomputed, _narrowed):
        for site, call in calls.items():
            if not call.func._schema.is_mutable:  # a changed operand would not be the one that is written to
                yield from kind(site, call, case)


def _tensors(call: Call) -> Iterator[tuple[int, Tensor]]:
    for at, leaf in enumerate(call.leaves):
        if isinstance(leaf, Tensor) and leaf.numel() > 1:
            yield at, leaf


def _operand(at: int, change: Callable[[Tensor], Tensor]) -> Run:
    """The call with one of its tensors changed."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten(args)
        if isinstance(leaves[at], Tensor):
            leaves[at] = change(leaves[at])
        return func(*tree_unflatten(leaves, spec), **kwargs)

    return run


def _lost(site: Site, call: Call, case: Case) -> Iterator[Planted]:
    """A part of what is reduced does not count; a sum is started anew in every pass."""
    neutral = EMPTY.get(site.name)
    first = call.leaves[0] if call.leaves else None
    if neutral is not None and isinstance(first, Tensor) and first.is_floating_point():
        for axis in reversed(range(first.dim())):
            for start, length in parts(first.shape[axis], case.tiles):

                def fill(t: Tensor, axis: int = axis, start: int = start, length: int = length) -> Tensor:
                    t = t.clone()
                    t.narrow(axis, min(start, t.shape[axis]), max(0, min(length, t.shape[axis] - start))).fill_(neutral)
                    return t

                text = f"elements {start}:{start + length} of {first.shape[axis]} along axis {axis} do not count"
                yield Planted(site, "lost accumulation", text, _operand(0, fill))
    if site.name == "add" and call.passes > 1:
        for keep in (0, 1):
            yield Planted(site, "lost accumulation", f"only operand {keep} is kept in every pass", _kept(keep))


def _misread(site: Site, call: Call, case: Case) -> Iterator[Planted]:
    """An operand is read one element too early or too late, or its first tile again and again, or an axis is another one."""
    for at, t in _tensors(call):
        for axis, size in reversed(list(enumerate(t.shape))):
            if size < 2:
                continue
            for step in (1, -1):
                change = _operand(at, functools.partial(torch.roll, shifts=step, dims=axis))
                yield Planted(site, "off by one", f"index i along axis {axis} of operand {at} is that at i{-step:+d}", change)
            for tile in (1, *(tile for tile in case.tiles if tile < size)):

                def again(t: Tensor, axis: int = axis, tile: int = tile) -> Tensor:
                    return t.index_select(axis, torch.arange(t.shape[axis], device=t.device) % tile)

                text = f"the first {tile} of {size} along axis {axis} of operand {at} stand for all the others"
                yield Planted(site, "stale buffer", text, _operand(at, again))
        for a in range(t.dim() - 1):
            if t.shape[a] == t.shape[a + 1]:
                change = _operand(at, functools.partial(torch.transpose, dim0=a, dim1=a + 1))
                yield Planted(site, "wrong axis", f"axes {a} and {a + 1} of operand {at} are exchanged", change)


def _narrowed(site: Site, call: Call, case: Case) -> Iterator[Planted]:
    """The result, or an operand, goes through a narrower dtype."""
    for name, bits in (("bfloat16", 8), ("float16 or TF32", 11)):
        if case.output.dtype != torch.float16 and any(t.is_floating_point() for _, t in _tensors(call)):

            def result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bits: int = bits) -> Any:
                leaves, spec = tree_flatten(func(*args, **kwargs))
                narrow = [rounded(t, bits) if isinstance(t, Tensor) and t.is_floating_point() else t for t in leaves]
                return tree_unflatten(narrow, spec)

            yield Planted(site, "missing cast", f"the result has the {bits}-bit significand of {name}", result)


def _compared(site: Site, call: Call, case: Case) -> Iterator[Planted]:
    """A limit counts that should not, or the other way round."""
    if site.name in CLOSE:
        yield Planted(site, "off by one", f"the comparison is {CLOSE[site.name]}", _instead(CLOSE[site.name]))


def _miscomputed(site: Site, call: Call, case: Case) -> Iterator[Planted]:
    """Operands exchanged, a term left out, a mask without effect, another operation."""
    floating = [at for at, t in _tensors(call) if t.is_floating_point()]
    if site.name in ("sub", "div", "where", "pow") and len(floating) == 2:
        yield Planted(site, "swapped operands", "the operands are exchanged", _exchanged(*floating))
    if site.name == "where":
        for keep in (1, 2):
            yield Planted(site, "unmasked tail", f"operand {keep} is taken everywhere", _kept(keep))
    if site.name in ("add", "sub", "mul", "div") and len(list(_tensors(call))) == 2:
        for keep in (0, 1):
            yield Planted(site, "wrong formula", f"operand {1 - keep} is missing", _kept(keep))
    if site.name in OTHER:
        yield Planted(site, "wrong formula", f"the operation is {OTHER[site.name]}", _instead(OTHER[site.name]))


def _exchanged(a: int, b: int) -> Run:
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten(args)
        leaves[a], leaves[b] = leaves[b], leaves[a]
        return func(*tree_unflatten(leaves, spec), **kwargs)

    return run


def _kept(operand: int) -> Run:
    """One operand, in the shape of the result, in place of the result."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, kept = func(*args, **kwargs), args[operand]
        kept = kept if isinstance(kept, Tensor) else torch.as_tensor(kept)
        return kept.to(result.dtype).broadcast_to(result.shape).clone()

    return run


def _instead(name: str) -> Run:
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(torch.ops.aten, name)(*args, **{k: v for k, v in kwargs.items() if k != "dtype"})

    return run
