"""Arguments for any operator, from its declaration and its cases alone: small sizes, drawn values."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdk import Op, registry
from kdk.cases import Cases, Dim
from kdk.torch_library import Operator
from kdk_bench.drawing import in_range, scalar
from kdk_bench.generate import fit

TOYS = Path(__file__).parent / "toys"
SMALL = (4, 6, 10, 2, 3, 12)  # the first is often a "*N", which splits into two dimensions


@functools.cache
def toy_operators() -> dict[str, Operator]:
    """Loaded once; out of the registry again."""
    loaded = {operator.op.name: operator for operator in registry.load_directory(TOYS)}
    for name in loaded:
        del registry.OPERATORS[name]
    return loaded


def cases(op: Op) -> Cases:
    return importlib.import_module(f"{op.package}.cases").CASES


def small_sizes(dims: Mapping[str, Dim]) -> dict[str, int]:
    """A small size for every letter, different where the restrictions leave it: twice the letter that it is a multiple of, at least."""
    sizes = fit(dict(zip(dims, SMALL, strict=False)), dims)
    return {letter: max(size, 2 * sizes.get(str(dims[letter].multiple), 0)) for letter, size in sizes.items()}


def valid_sizes(op: Op, scalars: Mapping[str, Any]) -> dict[str, int] | None:
    """Small sizes that the operator takes together with these scalar arguments; None where it takes none of those tried."""
    own = cases(op)
    for tried in itertools.product(*((size, 16, 4) for size in small_sizes(own.dims).values())):
        sizes = dict(zip(own.dims, tried))
        sized = {name: sizes[letter] for letter, name in op.sized.items()}
        if fit(sizes, own.dims) == sizes and (own.valid is None or own.valid(sizes, {**scalars, **sized})):
            return sizes
    return None


def shape(text: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """ "*N H" -> (2, N / 2, H) for an even N; "B|1" -> B."""
    dimensions: list[int] = []
    for token in text.split():
        size = sizes[token.removeprefix("*").partition("|")[0]]
        dimensions += [2, size // 2] if token.startswith("*") and size % 2 == 0 else [size]
    return tuple(dimensions)


def arguments(
    op: Op, dtype: torch.dtype = torch.float32, *, grad: bool | tuple[str, ...] = False, seed: int = 0, **sizes: int
) -> dict[str, Any]:
    """All arguments of an operator by name. grad: which differentiable inputs require one (True: all)."""
    sizes = {**small_sizes(cases(op).dims), **sizes}
    wanted = tuple(op.uses) if grad is True else grad or ()
    generator = torch.Generator().manual_seed(seed)
    result: dict[str, Any] = {}
    letters = {s: sizes[letter] for letter, s in op.sized.items()}
    for name, parameter in op.arguments.items():
        if name in op.indexes:
            size = shape(op.shapes[name], sizes)
            result[name] = torch.randint(0, sizes[op.indexes[name]], size, generator=generator)
        elif name in op.ranges:
            result[name] = in_range(shape(op.shapes[name], sizes), *op.ranges[name], dtype, generator)
        elif name in op.tensors:
            value = torch.randn(shape(op.shapes[name], sizes), generator=generator, dtype=torch.float64).to(dtype)
            result[name] = value.requires_grad_(name in wanted)
        elif name in letters:
            result[name] = letters[name]
        elif name in cases(op).scalars:
            result[name] = scalar(op, name, cases(op).scalars[name][0])
        elif parameter.default is not inspect.Parameter.empty:
            result[name] = parameter.default
        else:
            raise LookupError(f"{op.name}: cases.py has no value for {name!r}")
    return result


def results(value: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def floating(value: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The outputs that a gradient can flow to."""
    return [t for t in results(value) if t.is_floating_point() and t.itemsize > 1]


def total(value: Tensor | Sequence[Tensor]) -> Tensor:
    """A scalar whose gradient differs from element to element."""
    parts = []
    for t in floating(value):
        weights = torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype, device=t.device).reshape(t.shape)
        parts.append((t * weights).sum())
    return torch.stack(parts).sum()
