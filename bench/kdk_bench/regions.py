"""Likely causes that show in which part of an output is wrong: a tile that was skipped, or that holds what belongs to another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kdk_bench.hypotheses import FEW, Box, Case, Finding, shifted


def bounding_box(wrong: Tensor) -> Box:
    if wrong.dim() == 0:
        return ()
    at = wrong.nonzero()
    return tuple((int(low), int(high) + 1) for low, high in zip(at.amin(0), at.amax(0)))


def _views(case: Case) -> Iterator[tuple[Case, str]]:
    """The output as it is, and as the rows that a kernel makes of it: its first dimensions as one, and the others."""
    yield case, ""
    shape = case.k.shape
    for first in reversed(range(2, len(shape))):
        rows = (shape[:first].numel(), shape[first:].numel())
        names = ("output", "k", "o", "limit", "wrong")
        flat: dict[str, Any] = {name: getattr(case, name).reshape(rows) for name in names}
        yield dataclasses.replace(case, **flat, box=bounding_box(flat["wrong"])), f" of the output as {' x '.join(map(str, rows))}"


def stale(case: Case) -> Finding | None:
    if case.previous is not None:
        before = case.previous.double()
        if case.explains(before, case.wrong) and torch.equal(before[case.wrong], case.k[case.wrong]):
            return "stale buffer", "the wrong elements are those of the previous output"
    return next((found for view, name in _views(case) if (found := _shifted_by_a_tile(view, name))), None)


def _shifted_by_a_tile(case: Case, view: str) -> Finding | None:
    for axis in case.cut_axes():
        low, high = case.box[axis]
        distances = {high - low} | {tile for tile in case.tiles if tile >= high - low}
        aligned = case.aligned_tile(axis) is not None
        for step in [sign * d for d in sorted(distances) if aligned and d < case.k.shape[axis] for sign in (1, -1)]:
            if case.explains(shifted(case.o, axis, step), case.inside()):
                return "stale buffer", f"index i along axis {axis}{view} holds what belongs at i{-step:+d}, another tile"
    return None


def region(case: Case) -> Finding | None:
    """Only a box is wrong, and nearly all of it."""
    return next((found for view, name in _views(case) if (found := _box(view, name))), None)


def _box(case: Case, view: str) -> Finding | None:
    cut = case.cut_axes()
    if not cut or not case.dense():
        return None
    for axis in cut if len(cut) == 1 else ():
        (low, high), size = case.box[axis], case.k.shape[axis]
        tails = [t for t in case.tiles if t < size and low == size - size % t and size % t]
        if high == size and tails:
            return "unmasked tail", f"only the last {size - low} of {size} along axis {axis}{view} are wrong, a partial tile"
    if case.wrong.sum() < FEW:
        return None
    content = case.k[case.inside()]
    value = content[0]
    same = bool((content == value).all() | torch.isnan(content).all())
    for axis in cut if len(cut) == 1 and not same else ():
        (low, high), size = case.box[axis], case.k.shape[axis]
        if high == size > 2 * low and low in case.tiles:
            return "stale buffer", f"only the first {low} of {size} along axis {axis}{view} are right: what they need may serve the others"
    if same or all(case.aligned_tile(a) for a in cut):
        held = f"holds {float(value):.6g} throughout" if same else "holds other values"
        return "skipped tile", f"the wrong box{view} {held}"
    for axis in cut if len(cut) == 1 else ():
        (low, high), size = case.box[axis], case.k.shape[axis]
        if high - low == 1 and (low == 0 or high == size):
            return "off by one", f"only the {'first' if low == 0 else 'last'} index along axis {axis}{view} is wrong"
    return None


