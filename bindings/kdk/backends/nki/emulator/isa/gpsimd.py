"""GpSimdE: index patterns, selections, gathers and sorting, and reductions over partitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import access
from ..cost.constants import GPSIMD_START_CYCLES
from ..cost.records import elementwise
from ..dtypes import NUMPY, is_integer, round_to
from ..errors import need
from ..memory import SBUF
from ..operators import OPERATORS, token
from ..tensor import NkiTensor
from .common import Instruction, need_generation, need_integers
from .common import NkiInstruction as Handle

CORE_PARTITIONS = 16  # each of the eight cores sees 16 partitions


def _affine(op: str, t: NkiTensor, pattern: Sequence[Sequence[int]], offset: int, channel_multiplier: int) -> np.ndarray:
    """offset + partition * channel_multiplier + the pattern, in 32-bit integers, as (P, N)."""
    for p in pattern:
        need(len(p) == 2 and all(isinstance(v, (int, np.integer)) for v in p), "argument", f"{op}: pattern {pattern}")
    need(isinstance(offset, (int, np.integer)), "argument", f"{op}: offset {offset!r} must be an int")
    need(1 <= len(pattern) <= 4, "pattern", f"{op}: pattern of {len(pattern)} dimensions, limit 4")
    total = math.prod(count for _, count in pattern)
    need(
        total == t.per_partition,
        "shape",
        f"{op}: pattern {pattern} has {total} elements, the tile {t.per_partition} per partition",
    )
    values = np.zeros(1, np.int64)
    for step, count in pattern:
        values = (values[:, None] + np.arange(count) * step).reshape(-1)
    return (np.arange(t.partitions)[:, None] * channel_multiplier + values + offset).astype(np.int32)


def iota(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    offset: int = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> Handle:
    """dst = offset + partition * channel_multiplier + pattern."""
    ins = Instruction("iota", "gpsimd", name)
    dst = ins.out(dst, "dst", (SBUF,))
    values = _affine("iota", dst, pattern, offset, channel_multiplier)
    if not ins.data:
        ins.put(dst, None, True)
    elif dst.dtype == "int32":
        ins.put(dst, values, True, raw=True)
    else:
        ins.put(dst, values.astype(np.float64 if is_integer(dst.dtype) else np.float32), True)
    return ins.done(GPSIMD_START_CYCLES + dst.per_partition)


def affine_select(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Any = OPERATORS["equal"],
    offset: int = 0,
    name: str | None = None,
) -> Handle:
    """dst = on_true_tile where cmp_op(affine pattern, 0), else on_false_value."""
    n = "affine_select"
    compare = token(cmp_op)
    legal = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
    need(compare.name in legal, "operator", f"{n} compares with {compare}")
    ins = Instruction(n, "gpsimd", name)
    dst, tile = ins.out(dst, "dst", (SBUF,)), ins.tile(on_true_tile, "on_true_tile", (SBUF,))
    ins.same(dst, tile)
    fill, _ = ins.vector(on_false_value, dst.partitions, "on_false_value")
    chosen = _affine(n, dst, pattern, offset, channel_multiplier)
    chosen = compare.compute(chosen, np.int32(0)) != 0
    fine, x = ins.usable(tile), None
    fine = True if fine is True else np.asarray(fine) | ~chosen
    if ins.data:
        x = round_to(np.where(chosen, ins.f32(tile), fill), dst.dtype)
        x = np.where(chosen, ins.raw(tile), x) if tile.dtype == dst.dtype else x
    ins.put(dst, x, fine, raw=True)
    return ins.done(GPSIMD_START_CYCLES + dst.per_partition)


def tensor_partition_reduce(dst: NkiTensor, op: Any, data: NkiTensor, name: str | None = None) -> Handle:
    """dst (one partition) = op over the partitions of data."""
    n = "tensor_partition_reduce"
    op = token(op)
    need(op.name in ("add", "average", "maximum", "bitwise_or", "bitwise_and"), "operator", f"{n} with {op}")
    ins = Instruction(n, "gpsimd", name)
    dst, data = ins.out(dst, "dst", (SBUF,)), ins.tile(data, "data", (SBUF,))
    ins.fits(dst, 1, data.per_partition, "dst")
    bits = op.kind == "bits"
    if bits:
        need_integers(n, dst, data)
    fine = ins.usable(data)
    x: Any = None
    if ins.data and bits:
        x = op.function.reduce(ins.raw(data), axis=0, keepdims=True).astype(NUMPY[dst.dtype])  # type: ignore[union-attr]
    elif ins.data:
        values = ins.f32(data)
        x = values.max(0, keepdims=True) if op.name == "maximum" else values.sum(0, keepdims=True, dtype=np.float32)
        x = x / np.float32(data.partitions) if op.name == "average" else x
    ins.put(dst, x, True if fine is True else np.asarray(fine).all(0, keepdims=True), raw=bits)
    return ins.done(elementwise(data.per_partition, "gpsimd"))


def nc_n_gather(dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None) -> Handle:
    """dst[p, j] = data[p, indices[p, j]] with the free dimensions flattened."""
    n = "nc_n_gather"
    ins = Instruction(n, "gpsimd", name)
    dst, data, indices = (
        ins.out(dst, "dst", (SBUF,)),
        ins.tile(data, "data", (SBUF,)),
        ins.tile(indices, "indices", (SBUF,)),
    )
    ins.same(dst, indices)
    need(data.partitions == dst.partitions, "shape", f"{n}: data of {data.partitions} partitions into {dst.partitions}")
    need(dst.dtype == data.dtype, "dtype", f"{n} {data.dtype} into {dst.dtype}")
    need(indices.dtype == "uint32", "dtype", f"{n}: indices are {indices.dtype}, must be uint32")
    access.check_usable(indices, "the index")
    fine, x = ins.usable(data), None
    if ins.data:
        at = ins.raw(indices).astype(np.int64)
        need((at < data.per_partition).all(), "bounds", f"{n}: index {at.max()} into {data.per_partition} elements")
        x = np.take_along_axis(ins.raw(data), at, 1)
        fine = True if fine is True else np.take_along_axis(np.asarray(fine), at, 1)
    ins.put(dst, x, fine if ins.data else True, raw=True)
    return ins.done(elementwise(dst.per_partition, "gpsimd"))


def local_gather(
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> Handle:
    """Each group of 16 partitions gathers with its own indices, flattened partition first."""
    n = "local_gather"
    ins = Instruction(n, "gpsimd", name)
    dst, src, index = (
        ins.out(dst, "dst", (SBUF,)),
        ins.tile(src_buffer, "src_buffer", (SBUF,)),
        ins.tile(index, "index", (SBUF,)),
    )
    need(
        src.partitions == index.partitions == dst.partitions and src.partitions % CORE_PARTITIONS == 0,
        "shape",
        f"{n}: {src.partitions}, {index.partitions} and {dst.partitions} partitions; must be equal, a multiple of 16",
    )
    need(num_elem_per_idx in (1, 2, 4, 8, 16, 32), "limit", f"{n}: num_elem_per_idx {num_elem_per_idx}")
    need(index.dtype == "uint16", "dtype", f"{n}: index is {index.dtype}, must be uint16")
    need(dst.dtype == src.dtype, "dtype", f"{n} {src.dtype} into {dst.dtype}")
    available = index.per_partition * CORE_PARTITIONS
    valid = available if num_valid_indices is None else num_valid_indices
    need(0 < valid <= min(available, 4096), "limit", f"{n}: {valid} indices, limit {min(available, 4096)}")
    need(
        valid * num_elem_per_idx <= dst.per_partition,
        "shape",
        f"{n}: {valid * num_elem_per_idx} elements into {dst.per_partition}",
    )
    access.check_usable(index, "the index")
    known, before = ins.usable(src), access.usable(dst)
    if not ins.data:
        ins.put(dst, None, before is True or valid * num_elem_per_idx == dst.per_partition)
        return ins.done(_local_gather_cycles(src, valid, num_elem_per_idx))
    shape = (dst.partitions, dst.per_partition)
    values = ins.raw(dst).copy()
    states = np.ones(shape, bool) if before is True else np.asarray(before).reshape(shape).copy()
    fine = np.ones((src.partitions, src.per_partition), bool) if known is True else np.asarray(known)
    source, offsets, count = ins.raw(src), ins.raw(index).astype(np.int64), valid * num_elem_per_idx
    for first in range(0, src.partitions, CORE_PARTITIONS):
        rows = slice(first, first + CORE_PARTITIONS)
        at = (offsets[rows].T.reshape(-1)[:valid, None] + np.arange(num_elem_per_idx)).reshape(-1)
        need((at < src.per_partition).all(), "bounds", f"{n}: index {at.max()} into {src.per_partition} elements")
        values[rows, :count], states[rows, :count] = source[rows][:, at], fine[rows][:, at]
    ins.put(dst, values, True if states.all() else states, raw=True)
    return ins.done(_local_gather_cycles(src, valid, num_elem_per_idx))


def _local_gather_cycles(src: NkiTensor, valid: int, count: int) -> float:
    rate = ((28 + 4 * count) / (4 * count)) / min(4 / src.itemsize, count)
    return GPSIMD_START_CYCLES + valid * count / rate


def nonzero_with_count(dst: NkiTensor, src: NkiTensor, index_offset: int = 0, padding_val: int = -1, name: str | None = None) -> Handle:
    """Indices of non-zero elements, padding, and their count last; on partitions 0, 16, ..., 112 only."""
    n = "nonzero_with_count"
    need_generation(3, n)
    ins = Instruction(n, "gpsimd", name)
    dst, src = ins.out(dst, "dst", (SBUF,)), ins.tile(src, "src", (SBUF,))
    need(src.dtype in ("float32", "int32"), "dtype", f"{n}: src is {src.dtype}, must be float32 or int32")
    need(dst.dtype == "int32", "dtype", f"{n}: dst is {dst.dtype}, must be int32")
    ins.fits(dst, src.partitions, src.per_partition + 1, "dst")
    known, before = ins.usable(src), access.usable(dst)
    shape = (dst.partitions, dst.per_partition)
    states = np.ones(shape, bool) if before is True else np.asarray(before).reshape(shape).copy()
    fine = np.ones((src.partitions, src.per_partition), bool) if known is True else np.asarray(known)
    values = ins.raw(dst).copy() if ins.data else None
    for p in range(0, dst.partitions, CORE_PARTITIONS):
        states[p] = fine[p].all()
        if values is not None:
            found = np.flatnonzero(ins.raw(src)[p])
            values[p] = padding_val
            values[p, : len(found)], values[p, -1] = found + index_offset, len(found)
    ins.put(dst, values, True if states.all() else states, raw=True)
    return ins.done(GPSIMD_START_CYCLES + src.per_partition)


def topk(val_dst: NkiTensor, idx_dst: NkiTensor, src: NkiTensor, n: int, name: str | None = None) -> Handle:
    """The K largest values, ascending, and their indices, per 16 partitions that hold n elements as a snake.

    Which of equal values wins, and the order of their indices, is not documented; chosen here: the lower index counts
    as larger. Every partition of a group receives the result of its group (not verified).
    """
    op = "topk"
    ins = Instruction(op, "gpsimd", name)
    values, indices = ins.out(val_dst, "val_dst", (SBUF,)), ins.out(idx_dst, "idx_dst", (SBUF,))
    src = ins.tile(src, "src", (SBUF,))
    ins.same(values, indices)
    need(
        src.dtype == values.dtype == "bfloat16",
        "dtype",
        f"{op} of {src.dtype} into {values.dtype}; both must be bfloat16",
    )
    need(indices.dtype == "uint32", "dtype", f"{op}: indices are {indices.dtype}, must be uint32")
    k = values.per_partition
    need(
        src.partitions == values.partitions and src.partitions % CORE_PARTITIONS == 0,
        "shape",
        f"{op}: {src.partitions} and {values.partitions} partitions; must be equal, a multiple of 16",
    )
    need(8 <= n < 65536 and 1 <= k < 32768 and k <= n, "limit", f"{op}: n {n} (8 to 65535), K {k} (1 to min(n, 32767))")
    need(src.per_partition >= -(-n // 16), "shape", f"{op}: {src.per_partition} columns hold less than {n} elements")
    known = ins.usable(src)
    states: Any = True
    best: Any = None
    where: Any = None
    if ins.data:
        best, where = np.empty((src.partitions, k), np.float32), np.empty((src.partitions, k), np.uint32)
        for first in range(0, src.partitions, CORE_PARTITIONS):
            group = slice(first, first + CORE_PARTITIONS)
            snake = ins.f32(src)[group].T.reshape(-1)[:n]
            order = np.argsort(-snake, kind="stable")[:k][::-1]
            best[group], where[group] = snake[order], order
    if known is not True:
        columns = -(-n // 16)
        group_fine = np.asarray(known)[:, :columns].reshape(-1, CORE_PARTITIONS, columns).all((1, 2))
        states = np.repeat(group_fine, CORE_PARTITIONS)[:, None]
    ins.put(values, best, states)
    ins.put(indices, where, states, raw=True)
    return ins.done(4 * n + k)


def sequence_bounds(dst: NkiTensor, segment_ids: NkiTensor, name: str | None = None) -> Handle:
    """For each element the first index and one past the last index of its segment; padding (id 0) gets (n, -1)."""
    op = "sequence_bounds"
    ins = Instruction(op, "gpsimd", name)
    dst, ids = ins.out(dst, "dst", (SBUF,)), ins.tile(segment_ids, "segment_ids", (SBUF,))
    n = ids.per_partition
    need(ids.partitions == 1, "shape", f"{op}: segment_ids has {ids.partitions} partitions, must have 1")
    need(dst.shape == (1, 2, n), "shape", f"{op}: dst is {list(dst.shape)}, expected (1, 2, {n})")
    for t in (dst, ids):
        need(t.dtype in ("float32", "int32"), "dtype", f"{op}: {t.dtype}, must be float32 or int32")
    fine, x = ins.usable(ids), None
    if ins.data:
        values = ins.f32(ids)[0]
        starts, ends = np.full(n, n, np.float32), np.full(n, -1, np.float32)
        edges = np.flatnonzero(np.diff(values)) + 1
        for first, end in zip([0, *edges], [*edges, n]):
            if values[first] != 0:
                starts[first:end], ends[first:end] = first, end
        x = np.concatenate([starts, ends])[None]
    ins.put(dst, x, True if fine is True else np.asarray(fine).all(1, keepdims=True))
    return ins.done(elementwise(n, "gpsimd"))
