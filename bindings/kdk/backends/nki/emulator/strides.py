"""Arithmetic on shapes and strides, counted in elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .errors import need


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def merge(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(size, stride) pairs after joining neighbours that one stride can walk; size-1 dimensions vanish."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def reshape(shape: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of the same elements under another shape, or None where only a copy could do it."""
    groups = merge(shape, strides)
    result: list[int] = []
    left, step = groups.pop() if groups else (1, 1)
    for size in reversed(new):
        if size == 1:
            result.append(step)
            continue
        if left == 1 and groups:
            left, step = groups.pop()
        if left % size:
            return None
        result.append(step)
        left //= size
        step *= size
    return tuple(reversed(result)) if left == 1 and not groups else None


def last_offset(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """The smallest and the largest offset that a pattern reaches, relative to its start."""
    low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides))
    high = sum(max(0, (n - 1) * s) for n, s in zip(shape, strides))
    return low, high


def _members(group: str | Sequence[str]) -> tuple[str, ...]:
    return (group,) if isinstance(group, str) else tuple(group)


def rearrangement(
    shape: Sequence[int], source: Sequence, target: Sequence, fixed: Mapping[str, int]
) -> tuple[list[int], list[int], list[int]]:
    """An einops-style rearrangement as (shape to split into, permutation, shape to merge into)."""
    need(len(source) == len(shape), "argument", f"rearrange: {len(source)} patterns for {len(shape)} dimensions")
    sizes = dict(fixed)
    names: list[str] = []
    for group, total in zip(source, shape):
        members = _members(group)
        known = math.prod(sizes[m] for m in members if m in sizes)
        unknown = [m for m in members if m not in sizes]
        legal = len(unknown) <= 1 and total % known == 0
        need(legal, "argument", f"rearrange: the sizes of {members} in {total} are not determined")
        sizes.update(dict.fromkeys(unknown, total // known))
        fits = math.prod(sizes[m] for m in members) == total
        need(fits, "argument", f"rearrange: {members} have sizes {[sizes[m] for m in members]}, the dimension {total}")
        names += members
    order = [m for group in target for m in _members(group)]
    need(sorted(order) == sorted(names), "argument", f"rearrange {source} to {target}: the names differ")
    merged = [math.prod(sizes[m] for m in _members(group)) for group in target]
    return [sizes[m] for m in names], [names.index(m) for m in order], merged
