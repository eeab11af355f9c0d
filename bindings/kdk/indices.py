"""The tensors of `Op.indexes`: the range of their values, and the int32 that a language's kernels get."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdk.errors import InputError
from kdk.op import Op

INTEGERS = (torch.int64, torch.int32)
LARGEST = 2**31 - 1


class _Index(NamedTuple):
    name: str
    place: int
    letter: str
    sizes: tuple[tuple[int, int | None], ...]
    """Where the letter's size stands: an argument, and its dimension; None: the argument is the size."""
    sentinel: int | None
    """The place of the scalar that may also occur."""


class Indices:
    """The index tensors among the arguments of one direction. False where there are none."""

    def __init__(self, op: Op, direction: str) -> None:
        function: Callable[..., Any] | None = op.function(direction)
        assert function is not None
        names = list(inspect.signature(function).parameters)
        grads = dict(zip(names, op.outputs)) if direction == "backward" else {}
        texts = {name: op.shapes.get(grads.get(name, name), "") for name in names}
        self.op, self.found = op, []
        for name, letter in op.indexes.items():
            if name in names:
                sizes: list[tuple[int, int | None]] = [(names.index(n), d) for n, t in texts.items() for d in _dimensions(t, letter)]
                sizes += [(names.index(s), None) for each, s in op.sized.items() if each == letter and s in names]
                sentinel = op.sentinels.get(name, "")
                place = names.index(sentinel) if sentinel in names else None
                self.found.append(_Index(name, names.index(name), letter, tuple(sizes), place))

    def __bool__(self) -> bool:
        return bool(self.found)

    def narrowed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with int32 for int64, where the letter and the sentinel allow it: no accelerator here wants int64."""
        changed = list(args)
        for index in self.found:
            t, size = args[index.place], _size(index, args)
            sentinel = 0 if index.sentinel is None else args[index.sentinel] or 0
            if t is not None and t.dtype == torch.int64 and size is not None and max(size, abs(sentinel)) <= LARGEST:
                changed[index.place] = t.to(torch.int32)
        return tuple(changed)

    def check(self, args: tuple[Any, ...]) -> None:
        """Raise InputError for a value out of range. Reads the values: waits for the device."""
        for index in self.found:
            t, size = args[index.place], _size(index, args)
            if t is None or size is None:
                continue
            wrong = (t < 0) | (t >= size)
            may = None if index.sentinel is None else args[index.sentinel]
            if may is not None:
                wrong &= t != may
            if bool(wrong.any()):
                self._refuse(index, int(t[wrong][0]), size, may)

    def _refuse(self, index: _Index, value: int, size: int, sentinel: Any) -> None:
        problem = f"{self.op.name}: {index.name} holds a value out of range"
        limit = f"0 to {size - 1}, as {index.letter} is {size}" + ("" if sentinel is None else f", or {sentinel}")
        way_out = f"correct {index.name}; without kdk.strict() nobody looks, and what comes of it is as documented"
        raise InputError("KDK-INDEX", problem, value=value, limit=limit, way_out=way_out)


def _dimensions(text: str, letter: str) -> list[int]:
    """Where a letter stands in a tensor of any rank: from the end, unless a starred letter comes behind it."""
    tokens = text.split()
    if letter not in tokens:
        return []
    at = tokens.index(letter)
    starred = any(token.startswith("*") for token in tokens[at:])
    return [at if starred else at - len(tokens)]


def _size(index: _Index, args: tuple[Any, ...]) -> int | None:
    for place, dimension in index.sizes:
        value = args[place]
        if isinstance(value, Tensor) and dimension is not None:
            return value.shape[dimension]
        if dimension is None and value is not None:
            return int(value)
    return None
