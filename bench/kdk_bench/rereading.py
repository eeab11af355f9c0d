"""Likely causes of a wrong output that show when the oracle is computed from inputs as the kernel may have read them.

Without a reference to compute with, only the order of the elements in memory can be tried.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kdk_bench.hypotheses import NARROWER, Case, Finding


def as_contiguous(case: Case) -> Finding | None:
    """An input was read as if its elements lay one after another."""
    strided = {name: t for name, t in case.inputs.items() if not t.is_contiguous() and t.numel()}
    for name, t in strided.items():
        source = _source_of_each(t)
        if t.shape == case.o.shape:
            flat = case.o.flatten()
            moved = torch.where(source >= 0, flat[source.clamp_min(0)], torch.nan).reshape(case.o.shape)
            if case.explains(moved):
                return "ignored stride", f"the order of the elements is that of {name}, read as contiguous"
    for how, read, least in (("read as contiguous", _read_as_contiguous, 0), ("with a last stride of 1", _read_in_line, 2)):
        misread = {name: read(t) for name, t in strided.items() if t.is_floating_point() and t.stride(-1) >= least}
        for names in [(name,) for name in misread] + ([tuple(misread)] if len(misread) > 1 else []):
            h = run_reference(case, {name: misread[name] for name in names})
            if h is not None and case.explains(h):
                strides = ", ".join(f"{name} (strides {strided[name].stride()})" for name in names)
                return "ignored stride", f"the output is that of {strides} {how}"
    return None


def swapped(case: Case) -> Finding | None:
    for (a, t), (b, u) in itertools.combinations(case.inputs.items(), 2):
        if t.shape != u.shape or t.dtype != u.dtype:
            continue
        h = run_reference(case, {a: u, b: t})
        if h is not None and case.explains(h):
            return "swapped operands", f"the output is that of {a} and {b} exchanged"
    return None


def moved_input(case: Case) -> Finding | None:
    """An input, or all inputs of one shape, were read one element too early or too late, or along another axis."""
    groups: dict[torch.Size, list[str]] = {}
    for name, t in case.inputs.items():
        groups.setdefault(t.shape, []).append(name)
    together = [tuple(names) for names in groups.values() if len(names) > 1]
    for names in [(name,) for name in case.inputs] + together:
        moved = {name: case.inputs[name] for name in names}
        t = moved[names[0]]
        for axis, step in itertools.product(range(t.dim()), (1, -1)):
            if t.shape[axis] < 2:
                continue
            h = run_reference(case, {name: u.roll(step, axis) for name, u in moved.items()})
            # What the kernel found beyond the end is not known.
            if h is not None and case.explains(_without(h, t, axis, 0 if step == 1 else t.shape[axis] - 1, 1)):
                return "off by one", f"index i along axis {axis} of {' and '.join(names)} was read at i{-step:+d}"
        for a, b in itertools.combinations(range(t.dim()), 2):
            if t.shape[a] == t.shape[b] > 1:
                h = run_reference(case, {name: u.transpose(a, b) for name, u in moved.items()})
                if h is not None and case.explains(h):
                    return "wrong axis", f"axes {a} and {b} of {' and '.join(names)} were exchanged"
    return None


def repeated_input(case: Case) -> Finding | None:
    """The first tile of an input, or its first element, was read again and again."""
    for name, t in case.inputs.items():
        for axis, size in enumerate(t.shape):
            for tile in (1, *(tile for tile in case.tiles if tile < size)) if size > 1 else ():
                h = run_reference(case, {name: t.index_select(axis, torch.arange(size) % tile)})
                if h is not None and case.explains(h, case.inside()):
                    return "stale buffer", f"the first {tile} of {size} along axis {axis} of {name} were read for all the others"
    return None


def part_of_input(case: Case) -> Finding | None:
    """A reduction left out a part of an input: the last element, the last tiles, or all but the last tile."""
    for name, t in case.inputs.items():
        if not t.is_floating_point():
            continue
        for axis, neutral in itertools.product(reversed(range(t.dim())), (0.0, -torch.inf)):
            for start, length in parts(t.shape[axis], case.tiles):
                changed = t.double().clone()
                changed.narrow(axis, start, length).fill_(neutral)
                h = run_reference(case, {name: changed})
                if h is not None and case.explains(_without(h, t, axis, start, length)):
                    part = f"{start}:{start + length} of {t.shape[axis]}"
                    return "lost accumulation", f"elements {part} along axis {axis} of {name} do not count"
    return None


def rounded_input(case: Case) -> Finding | None:
    """All inputs, or one of them, went through a narrower dtype."""
    floating = [name for name, t in case.inputs.items() if t.is_floating_point()]
    for dtype, bits in NARROWER.get(case.output.dtype, NARROWER[torch.float32]).items():  # of a choice too
        for names in [floating, *([name] for name in floating if len(floating) > 1)]:
            h = run_reference(case, {name: rounded(case.inputs[name], bits) for name in names})
            if h is not None and case.explains(h):
                return "missing cast", f"the output is that of {', '.join(names)} rounded to the {bits}-bit significand of {dtype}"
    return None


def run_reference(case: Case, changed: Mapping[str, Tensor], mode: TorchDispatchMode | None = None) -> Tensor | None:
    """What the reference makes of the inputs with these in place of some, under a mode; None where it does not take that."""
    if case.reference is None:
        return None
    inputs = {name: t.double() if t.is_floating_point() else t for name, t in (dict(case.inputs) | dict(changed)).items()}
    try:
        with mode or contextlib.nullcontext():
            h = case.reference(inputs)
    except Exception:
        # Whatever a reference raises for what it was not made for: then this fault cannot have been the cause.
        return None
    return h.double() if h.shape == case.o.shape else None


def _offsets(t: Tensor) -> Tensor:
    """Where each element lies in memory, counted from the first."""
    offset = torch.zeros(t.shape, dtype=torch.int64)
    for axis, (size, stride) in enumerate(zip(t.shape, t.stride())):
        offset += (torch.arange(size) * stride).reshape([-1] + [1] * (t.dim() - axis - 1))
    return offset.flatten()


def _source_of_each(t: Tensor) -> Tensor:
    """For each element of `t`, the flat index of the element found there when t is read as contiguous; -1: not of t."""
    order = _offsets(t).sort()
    wanted = torch.arange(t.numel())
    at = torch.searchsorted(order.values, wanted).clamp_max(t.numel() - 1)
    return torch.where(order.values[at] == wanted, order.indices[at], -1)


def _read_as_contiguous(t: Tensor) -> Tensor:
    """What lies in memory from the first element on; NaN beyond the end of the storage."""
    available = t.untyped_storage().nbytes() // t.itemsize - t.storage_offset()
    found = torch.full((t.numel(),), torch.nan, dtype=torch.float64)
    length = min(available, t.numel())
    found[:length] = t.as_strided((length,), (1,)).double()
    return found.reshape(t.shape)


def _read_in_line(t: Tensor) -> Tensor:
    """What lies there when the last stride is taken for 1: that of more than 1 reached further, so this is in the storage."""
    return t.as_strided(t.shape, (*t.stride()[:-1], 1)).double()


def _without(h: Tensor, t: Tensor, axis: int, start: int, length: int) -> Tensor:
    """`h` with no statement (NaN) about the elements that belong to this part of the input, if it has that axis."""
    from_the_right = axis - t.dim()
    if h.dim() < -from_the_right or h.shape[from_the_right] != t.shape[axis]:
        return h
    h = h.clone()
    h.narrow(from_the_right, start, length).fill_(torch.nan)
    return h


def parts(size: int, tiles: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and length of what a faulty loop leaves out."""
    seen = set()
    if size > 1:
        seen |= {(size - 1, 1), (0, 1)}
    for tile in tiles:
        if tile < size:
            last = (size - 1) // tile * tile
            seen |= {(last, size - last), (0, last), (0, tile), (tile, size - tile)}
    yield from sorted(seen, key=lambda part: part[1])


def rounded(t: Tensor, bits: int) -> Tensor:
    mantissa, exponent = torch.frexp(t.double())
    return torch.ldexp((mantissa * 2.0**bits).round() / 2.0**bits, exponent)
