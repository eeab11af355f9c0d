"""VectorE: the instructions that find and replace 8 values per partition, and the shuffle between partitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cost.records import elementwise
from ..dtypes import NUMPY
from ..errors import need
from ..tensor import NkiTensor
from .common import Instruction, meet, rows, starts_legally
from .common import NkiInstruction as Handle

LEAST, MOST = 8, 16384


def _eight(op: str, data: NkiTensor, *eights: tuple[NkiTensor, str]) -> None:
    need(LEAST <= data.per_partition <= MOST, "limit", f"{op} of {data.per_partition} elements, {LEAST} to {MOST}")
    for t, what in eights:
        legal = (t.partitions, t.per_partition) == (data.partitions, 8)
        need(legal, "shape", f"{op}: {what} is {list(t.shape)}, expected ({data.partitions}, 8)")


def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> Handle:
    """The 8 largest values of each partition, descending."""
    ins = Instruction("max8", "vector", name)
    dst, src = ins.out(dst), ins.tile(src, "src")
    _eight("max8", src, (dst, "dst"))
    x = -np.sort(-ins.f32(src), axis=1)[:, :8] if ins.data else None
    ins.put(dst, x, rows(ins.usable(src)))
    return ins.done(elementwise(src.per_partition))


def nc_find_index8(dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None) -> Handle:
    """Index of each of 8 values in its partition; equal values take successive occurrences; a miss is all ones."""
    n = "nc_find_index8"
    ins = Instruction(n, "vector", name)
    dst, data, vals = ins.out(dst), ins.tile(data, "data"), ins.tile(vals, "vals")
    _eight(n, data, (dst, "dst"), (vals, "vals"))
    need(dst.dtype in ("uint16", "uint32"), "dtype", f"{n} into {dst.dtype}, must be uint16 or uint32")
    fine, out = meet(rows(ins.usable(data)), ins.usable(vals)), None
    if ins.data:
        x, v = ins.f32(data), ins.f32(vals)
        out = np.full((data.partitions, 8), np.iinfo(NUMPY[dst.dtype]).max, NUMPY[dst.dtype])
        for j in range(8):
            hits = x == v[:, j : j + 1]
            earlier = (v[:, :j] == v[:, j : j + 1]).sum(1, keepdims=True)
            wanted = hits & (np.cumsum(hits, 1) == earlier + 1)
            found = wanted.any(1)
            out[found, j] = wanted.argmax(1)[found]
    ins.put(dst, out, fine, raw=True)
    return ins.done(elementwise(data.per_partition))


def nc_match_replace8(
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> Handle:
    """dst = data with one occurrence of each of 8 values replaced by imm; the last value is taken first."""
    n = "nc_match_replace8"
    ins = Instruction(n, "vector", name)
    dst, data, vals = ins.out(dst), ins.tile(data, "data"), ins.tile(vals, "vals")
    _eight(n, data, (vals, "vals"))
    ins.same(dst, data)
    if isinstance(imm, NkiTensor):
        raise TypeError(f"{n}: imm must be a number")
    fine = meet(rows(ins.usable(data)), rows(ins.usable(vals)))
    x: Any = None
    indices: Any = None
    if ins.data:
        x, indices = _match_and_replace(ins.f32(data).copy(), ins.f32(vals), np.float32(imm))
    ins.put(dst, x, fine)
    if dst_idx is not None:
        out = ins.out(dst_idx, "dst_idx")
        _eight(n, data, (out, "dst_idx"))
        need(out.dtype in ("uint16", "uint32"), "dtype", f"{n}: indices into {out.dtype}, must be uint16 or uint32")
        ins.put(out, indices.astype(NUMPY[out.dtype]) if ins.data else None, fine, raw=True)
    return ins.done(elementwise(data.per_partition))


def _match_and_replace(x: np.ndarray, vals: np.ndarray, imm: np.float32) -> tuple[np.ndarray, np.ndarray]:
    lanes = np.arange(len(x))
    used = np.zeros(x.shape, bool)
    indices = np.full((len(x), 8), 0xFFFFFFFF, np.uint32)  # what a miss writes is not documented; as in nc_find_index8
    for j in reversed(range(8)):
        hits = (x == vals[:, j : j + 1]) & ~used
        found, at = hits.any(1), hits.argmax(1)
        used[lanes[found], at[found]] = True
        indices[found, j] = at[found]
    x[used] = imm
    return x, indices


def nc_stream_shuffle(dst: NkiTensor, src: NkiTensor, shuffle_mask: Sequence[int], name: str | None = None) -> Handle:
    """Within each 32 partitions dst[i] = src[mask[i]]; 255 keeps dst."""
    n = "nc_stream_shuffle"
    ins = Instruction(n, "vector", name)
    mask = [int(m) for m in shuffle_mask]
    need(len(mask) == 32, "argument", f"{n}: a mask of {len(mask)} entries, must be 32")
    need(all(m == 255 or 0 <= m < 32 for m in mask), "argument", f"{n}: mask {mask}; entries are 0 to 31, or 255")
    dst, src = ins.out(dst), ins.tile(src, "src")
    need(dst.dtype == src.dtype, "dtype", f"{n} {src.dtype} to {dst.dtype}")
    need(dst.per_partition == src.per_partition, "shape", f"{n}: {list(src.shape)} to {list(dst.shape)}")
    active = -(-max(dst.partitions, src.partitions) // 32) * 32
    for t, what in ((dst, "dst"), (src, "src")):
        need(
            starts_legally(active, t.start_partition),
            "start-partition",
            f"{n}: {what} with {active} active partitions from {t.start_partition}",
        )
    ins.reads.append(dst)
    shape = (dst.partitions, dst.per_partition)
    given, kept = ins.usable(src), ins.usable(dst) if 255 in mask else True
    states = np.zeros(shape, bool)
    source: Any = ins.raw(src) if ins.data else None
    out: Any = ins.raw(dst).copy() if ins.data else None
    for p in range(dst.partitions):
        entry = mask[p % 32]
        origin = p // 32 * 32 + entry
        if entry == 255:
            states[p] = kept if kept is True else np.asarray(kept)[p]
        elif origin < src.partitions:  # beyond the source view the data is unknown: it stays unusable
            states[p] = given if given is True else np.asarray(given)[origin]
            if out is not None:
                out[p] = source[origin]
    ins.put(dst, out, True if states.all() else states, raw=True)
    return ins.done(elementwise(dst.per_partition))
