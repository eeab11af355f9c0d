"""The tensors of a case: awkward values in awkward layouts. Nothing here knows an operator."""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdk.layouts import CHANNELS_LAST
from kdk.op import Op
from kdk_bench.declared_cases import cases_of
from kdk_bench.generate import Problem, shape

LAYOUTS = ("contiguous", "transposed", "strided", "chunk", "padded", "offset", "expanded", "far rows", "far columns", "channels_last")


def _of_one_sum(op: Op, name: str, rank: int) -> int:
    """Trailing dimensions of a tensor that one result sums over: of a row, the last one; of a group of channels, those and all pixels.

    They have one scale. In a sum in order the terms of a smaller scale may be lost, each by rounding, which is no fault.
    """
    letters = [token.removeprefix("*").partition("|")[0] for token in op.shapes[name].split()]
    summed = [op.summed(result) for result in (*op.outputs, *op.saved)]
    first = min([letters.index(other) for s in summed if letters and letters[-1] in s for other in s if other in letters[:-1]], default=-1)
    return 1 if first < 0 else rank - first  # only the last letter is starred where others are summed with it


def _values(size: tuple[int, ...], dtype: torch.dtype, kind: str, generator: torch.Generator, inner: int) -> Tensor:
    """float64 values of a kind, not yet rounded. inner: the last dimensions, which have a scale in common."""
    x = torch.randn(size, generator=generator, dtype=torch.float64)
    narrow = dtype == torch.float16
    rows = (*size[:-inner], *[1] * inner) if size else ()
    if kind == "scales" and len(size) > 1:
        span = 1.5 if narrow else 3.0
        x *= 10.0 ** (torch.rand(rows, generator=generator, dtype=torch.float64) * 2 * span - span)
    elif kind in ("tiny", "huge"):
        x *= 2.0 ** ((-6 if narrow else -40) if kind == "tiny" else (6 if narrow else 40))
    elif kind == "special" and len(size) > 1 and x.numel():
        hit = torch.rand(rows, generator=generator, dtype=torch.float64) < 0.3  # some rows stay finite
        where = (torch.rand(size, generator=generator, dtype=torch.float64) < 0.1) & hit
        pick = torch.randint(0, 3, size, generator=generator)
        x = torch.where(where, torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.float64)[pick], x)
    return x


def _place(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The values in a layout, and the storage they live in, NaN all around (of integers the largest)."""
    around = math.nan if x.is_floating_point() else torch.iinfo(x.dtype).max
    if layout == "channels_last" and x.dim() in CHANNELS_LAST:
        base = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
        return base, base
    if x.dim() == 0 or layout == "contiguous":
        base = x.contiguous()
        return base, base

    def wider(last: int) -> Tensor:
        return torch.full((*x.shape[:-1], last), around, dtype=x.dtype)

    n = x.shape[-1]
    if layout in ("far rows", "far columns"):
        return _far(x, layout == "far columns")
    if layout == "transposed" and x.dim() >= 2:
        base = x.transpose(-1, -2).contiguous()
        return base.transpose(-1, -2), base
    if layout == "strided":
        base = wider(2 * n + 1)
        view = base[..., 1 : 2 * n + 1 : 2]
    elif layout == "chunk":
        base = wider(2 * n)
        view = base.chunk(2, -1)[1] if n else base[..., :0]
    elif layout == "padded":  # a window in every dimension
        base = torch.full((*(d + 1 for d in x.shape[:-1]), n + 5), around, dtype=x.dtype)
        view = base[(*(slice(1, None) for _ in x.shape[:-1]), slice(n))]
    elif layout == "offset":
        base = torch.full((x.numel() + 3,), around, dtype=x.dtype)
        view = base[3:].view(x.shape)
    elif layout == "expanded" and x.shape[0] > 1:
        base = x[:1].contiguous()
        return base.expand(x.shape), base
    else:
        base = x.contiguous()
        return base, base
    view.copy_(x)
    return view, base


def _far(x: Tensor, columns: bool) -> tuple[Tensor, Tensor]:
    """The values so far apart that offsets pass 2^31 elements, which arithmetic in int32 cannot reach. columns: transposed.

    The memory between them is reserved and never touched. It is no part of what is watched for writes.
    """
    rows, n = math.prod(x.shape[:-1]), x.shape[-1]
    columns = columns or rows == 1
    count = n if columns else rows
    if count < 2 or not x.numel():
        return x.contiguous(), x.contiguous()
    step = max(2**31 // (count - 1) + 1, x.numel() // count)
    lead = torch.empty(x.shape[:-1], device="meta").stride()
    strides = (*lead, step) if columns else (*(step * stride for stride in lead), 1)
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = torch.frombuffer(mmap.mmap(-1, span * x.itemsize, flags=flags), dtype=torch.uint8)
    view = memory.view(x.dtype).as_strided(x.shape, strides)
    view.copy_(x)
    return view, view


def in_range(size: tuple[int, ...], low: float, high: float, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values of `Op.ranges`, in their dtype; the last two are the least and the largest."""
    values = (low + (high - low) * torch.rand(size, generator=generator, dtype=torch.float64)).to(dtype).flatten()
    below = torch.nextafter(torch.tensor(high, dtype=dtype), torch.tensor(low, dtype=dtype))
    if len(values) > 2:
        values[-2:] = torch.stack((below.new_tensor(low), below))
    return values.clamp(max=below).reshape(size)


def _indices(op: Op, name: str, problem: Problem, generator: torch.Generator) -> Tensor:
    """Values in the range of the letter that a tensor of `Op.indexes` points into, in the problem's pattern."""
    size, count = problem.sizes[op.indexes[name]], math.prod(shape(op, name, problem))
    many = {"duplicates": min(4, size), "equal": 1}.get(problem.pattern, count)
    some = torch.randint(0, max(size, 1), (max(many, 1),), generator=generator)
    values = some[torch.randint(0, len(some), (count,), generator=generator)]
    if problem.pattern in ("random", "sorted"):
        values = some[:count]
        edges = torch.tensor([0, size - 1, size - 1, 0])[:count]  # the first and the last, twice
        values[: len(edges)] = edges
    sentinel = problem.scalars[op.sentinels[name]] if name in op.sentinels else None
    if sentinel is not None:
        share = 1.0 if problem.pattern == "sentinel" else 0.2
        hit = torch.rand(count, generator=generator) < share
        values = torch.where(hit, sentinel, values)
    if problem.pattern == "sorted":
        values = values.sort().values
    return values.reshape(shape(op, name, problem)).to(getattr(torch, problem.index_dtype))


def scalar(op: Op, name: str, value: Any) -> Any:
    """A scalar argument as the operator takes it: cases.py names dtypes."""
    of_dtype = "dtype" in str(op.arguments[name].annotation)
    return getattr(torch, value) if of_dtype and isinstance(value, str) else value


@dataclass(frozen=True)
class Arguments:
    """Tensors by name (None: left out), and the storages behind them (to see whether a kernel wrote to them)."""

    tensors: Mapping[str, Tensor | None]
    storages: tuple[Tensor, ...]


def draw(
    op: Op,
    names: tuple[str, ...],
    problem: Problem,
    dtype: torch.dtype,
    seed: int,
    *,
    prefix: str = "",
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Arguments:
    """Tensors called `names`, each with its declared shape. Every name has random numbers of its own. dtypes: where not `dtype`."""
    tensors: dict[str, Tensor | None] = {}
    storages = []
    largest = {} if prefix else cases_of(op).largest
    origin = problem.name.partition(": ")[0]  # of a case that was made smaller: it keeps the numbers that showed the fault
    for name in names:
        if name in problem.without:
            tensors[name] = None
            continue
        number = int.from_bytes(hashlib.sha256(f"{origin} {prefix}{name} {seed}".encode()).digest()[:7], "little")
        generator = torch.Generator().manual_seed(number)
        own = getattr(torch, op.mixed[name]) if name in problem.mixed and name in op.mixed else (dtypes or {}).get(name, dtype)
        kind = "normal" if prefix and problem.values in ("tiny", "huge") else problem.values
        if name in op.indexes:
            values = _indices(op, name, problem, generator)
        elif name in op.ranges and not prefix:
            values = in_range(shape(op, name, problem), *op.ranges[name], own, generator)
        else:
            size = shape(op, name, problem)
            values = _values(size, dtype, kind, generator, 1 if prefix else _of_one_sum(op, name, len(size)))
            values = (values.clamp(-largest[name], largest[name]) if name in largest else values).to(own)
        tensors[name], base = _place(values, problem.layout)
        storages.append(base)
    return Arguments(tensors, tuple(storages))
