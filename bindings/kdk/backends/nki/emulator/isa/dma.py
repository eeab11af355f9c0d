"""DMA: copies between HBM and SBUF, with gather and scatter, transposes and sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import access
from ..core import current
from ..cost import constants
from ..cost.records import dma_us
from ..dtypes import is_packed, round_to, widen
from ..errors import call_site, need, refuse
from ..memory import HBM, POISON, SBUF, SHARED, WRITTEN
from ..operators import token
from ..tensor import NkiTensor
from . import enums
from .common import Instruction, member, need_generation
from .common import NkiInstruction as Handle

REACHED = (SBUF, HBM, SHARED)


def _side(op: str, t: Any, what: str) -> NkiTensor:
    if not isinstance(t, NkiTensor):
        raise TypeError(f"{op}: {what} must be a tensor, not {type(t).__name__}")
    if t.buffer not in REACHED:
        refuse("memory", f"{op}: {what} {t}; DMA reaches HBM and SBUF only")
    need(t.indirection is None, "pattern", f"{op}: {what} is an indirect view; use vector_select or .ap(vector_offset=)")
    if t.on_chip and t.partitions > 1 and t.strides[0] not in (t.row_elements, 0):
        refuse("pattern", f"{op}: {what} {t} skips partitions")
    access.open_tile(t)
    return t


def _is_vector(t: NkiTensor) -> bool:
    return t.dynamic is not None and t.dynamic.kind == "vector"


def _modes(op: str, priority: Any, oob: Any, dge: Any) -> bool:
    """Check the modes all DMA calls share; whether an index out of bounds is skipped."""
    member(oob, enums.oob_mode, op)
    member(dge, enums.dge_mode, op)
    if priority is not None:
        need_generation(4, f"{op} with priority")
        need(priority in (0, 1, 2, 3), "argument", f"{op}: priority {priority}, must be 0 to 3")
    if dge is enums.dge_mode.hwdge:
        need_generation(3, f"{op} with hwdge")
    return oob is enums.oob_mode.skip


def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: Any = enums.oob_mode.error,
    dge_mode: Any = enums.dge_mode.unknown,
    engine: Any = enums.engine.unknown,
    name: str | None = None,
) -> Handle | None:
    """dst = cast(src). One side may be addressed by an index per partition (gather, scatter)."""
    op = "dma_copy"
    dst, src = _side(op, dst, "dst"), _side(op, src, "src")
    skip = _modes(op, priority, oob_mode, dge_mode)
    need(not skip or dst.dynamic or src.dynamic, "argument", f"{op}: oob_mode.skip on a static access")
    need(
        src.size == dst.size,
        "shape",
        f"{op}: {list(src.shape)} to {list(dst.shape)}, {src.size} and {dst.size} elements",
    )
    hardware = dge_mode is enums.dge_mode.hwdge
    if src.dtype != dst.dtype:
        need(not hardware, "dtype", f"{op}: hwdge cannot cast {src.dtype} to {dst.dtype}")
        need(not is_packed(src.dtype) and not is_packed(dst.dtype), "dtype", f"{op}: {src.dtype} to {dst.dtype}")
    vectors = [t for t in (dst, src) if _is_vector(t)]
    need(not (hardware and vectors), "pattern", f"{op}: hwdge cannot gather or scatter; use swdge")
    need(len(vectors) < 2, "pattern", f"{op}: both sides have an index per partition")
    if not isinstance(engine, enums.engine):
        refuse("removed", f"{op}: engine={engine!r}")
    legal = engine is enums.engine.unknown or (hardware and engine in (enums.engine.sync, enums.engine.scalar))
    need(legal, "engine", f"{op} on {engine}; sync or scalar, and only with hwdge")
    ins = Instruction(op, "dma", name)
    start, target = access.resolve(src, skip), access.resolve(dst, skip)
    if start is None or target is None:
        return None
    ins.reads.append(start)
    ins.writes.append(target)
    _transfer(ins, target, start, skip)
    return _record(ins, target, start)


def _transfer(ins: Instruction, dst: NkiTensor, src: NkiTensor, skip: bool) -> None:
    if _is_vector(src):
        _gather(ins, dst, src, skip)
        return
    fine = access.usable(src)
    if fine is not True:
        ins.poison = src.storage.poison
    x = _cast(access.array(src), src.dtype, dst.dtype) if ins.data else None
    if _is_vector(dst):
        _scatter(ins, dst, x, fine, skip)
        return
    if x is not None:
        access.array(dst)[...] = x if x.shape == dst.shape else x.reshape(dst.shape)
    access.mark(dst, fine if fine is True else np.asarray(fine).reshape(dst.shape), WRITTEN, ins.poison)


def _cast(x: np.ndarray, old: str, new: str) -> np.ndarray:
    return x if old == new else round_to(widen(x), new)


def _gather(ins: Instruction, dst: NkiTensor, src: NkiTensor, skip: bool) -> None:
    """Partition p of dst gets the row that the index of partition p names; rows out of bounds keep dst."""
    index = src.dynamic.index  # type: ignore[union-attr]
    need(index.size >= src.shape[0], "shape", f"{ins.op}: vector_offset {index} for {src.shape[0]} rows")
    if not ins.data:
        access.check_usable(index, "the index")
        access.touch(index)
        access.mark(dst, access.usable(access.as_line(src)) is True or np.zeros(dst.shape, bool), WRITTEN, src.storage.poison)
        return
    addresses, inside = access.gather_addresses(src, skip)
    line = access.as_line(src)
    fine = access.usable(line)
    x = _cast(access.array(line)[addresses[inside]], src.dtype, dst.dtype)
    known = np.ones(x.shape, bool) if fine is True else np.asarray(fine)[addresses[inside]]
    if not known.all():
        ins.poison = src.storage.poison
    if inside.all():
        access.array(dst)[...] = x.reshape(dst.shape)
        access.mark(dst, True if known.all() else known.reshape(dst.shape), WRITTEN, ins.poison)
        return
    need(dst.shape[0] == src.shape[0], "shape", f"{ins.op}: skipping rows needs one partition of dst per index")
    before = access.usable(dst)
    states = np.ones(dst.shape, bool) if before is True else np.asarray(before).copy()
    values = access.array(dst).reshape(dst.shape[0], -1).copy()
    flat_states = states.reshape(dst.shape[0], -1)
    values[inside], flat_states[inside] = x, known
    access.array(dst)[...] = values.reshape(dst.shape)
    access.mark(dst, True if flat_states.all() else flat_states.reshape(dst.shape), WRITTEN, ins.poison or dst.storage.poison)


def _scatter(ins: Instruction, dst: NkiTensor, x: Any, fine: Any, skip: bool) -> None:
    index = dst.dynamic.index  # type: ignore[union-attr]
    need(index.size >= dst.shape[0], "shape", f"{ins.op}: vector_offset {index} for {dst.shape[0]} rows")
    if x is None:
        access.check_usable(index, "the index")
        access.touch(index)
        dst.storage.written = True
        dst.storage.elements_written += dst.size
        return
    addresses, inside = access.gather_addresses(dst, skip)
    line = access.as_line(dst)
    access.array(line)[addresses[inside]] = x.reshape(dst.shape[0], -1)[inside]
    states = WRITTEN if fine is True else np.where(np.asarray(fine).reshape(dst.shape[0], -1)[inside], WRITTEN, WRITTEN | POISON)
    if fine is not True:
        dst.storage.poison = dst.storage.poison or ins.poison or ("uninitialised", call_site())
    if fine is not True or access.usable(line) is not True:
        access.cells(line)[addresses[inside]] = np.asarray(states, np.uint8)[..., None]
    dst.storage.written = True
    dst.storage.elements_written += dst.size


def _record(ins: Instruction, dst: NkiTensor, src: NkiTensor, share: float = 1.0) -> Handle:
    moved = max(dst.size * dst.itemsize, src.size * src.itemsize)
    hbm = sum(t.size * t.itemsize for t in (dst, src) if not t.on_chip)
    chip = [t for t in (dst, src) if t.on_chip]
    partitions = min(t.partitions for t in chip) if chip else constants.DMA_ENGINES * constants.PARTITIONS_PER_DMA_ENGINE
    if moved / partitions < 512:
        ins.core.lint(f"{ins.op} moves {moved // partitions} bytes per partition, less than 512", call_site())
    return ins.done(0, us=dma_us(dst, src, share), moved=moved, hbm=hbm)


def broadcast_partition(dst: NkiTensor, src: NkiTensor) -> Handle:
    """Copy one partition to all, for nl.broadcast_to."""
    ins = Instruction("dma_copy", "dma")
    ins.reads.append(src)
    ins.writes.append(dst)
    _transfer(ins, dst, src, False)
    return _record(ins, dst, src)


PERMUTATIONS = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: Sequence[int] | None = None,
    priority: int | None = None,
    dge_mode: Any = enums.dge_mode.unknown,
    oob_mode: Any = enums.oob_mode.error,
    name: str | None = None,
) -> Handle | None:
    """dst = src with its first and last dimensions swapped; src may be rows gathered from HBM."""
    op = "dma_transpose"
    dst, src = _side(op, dst, "dst"), _side(op, src, "src")
    skip = _modes(op, priority, oob_mode, dge_mode)
    order = PERMUTATIONS.get(src.ndim)
    need(order is not None, "dma-transpose", f"{op} of {src.ndim} dimensions, must be 2 to 4")
    need(axes is None or tuple(axes) == order, "dma-transpose", f"{op}: axes {axes}, must be {order}")
    need(dst.dtype == src.dtype, "dtype", f"{op} {src.dtype} to {dst.dtype}")
    transposed = tuple(src.shape[d] for d in order)  # type: ignore[union-attr]
    need(
        dst.shape == transposed,
        "dma-transpose",
        f"{op}: {list(src.shape)} becomes {list(transposed)}, dst is {list(dst.shape)}",
    )
    vector = _is_vector(src)
    need(not skip or vector, "argument", f"{op}: oob_mode.skip without an index per row")
    if vector:
        _check_gather_transpose(op, src, dge_mode)
    else:
        need(dge_mode in (enums.dge_mode.unknown, enums.dge_mode.hwdge), "dma-transpose", f"{op} with {dge_mode}")
        if dge_mode is enums.dge_mode.hwdge:
            _check_hardware_transpose(op, src)
    ins = Instruction(op, "dma", name)
    resolved, target = access.resolve(src), access.resolve(dst)
    assert resolved is not None and target is not None
    src, dst = resolved, target
    ins.reads.append(src)
    ins.writes.append(dst)
    if vector:
        _gather_transpose(ins, dst, src, order, skip)  # type: ignore[arg-type]
    else:
        fine = access.usable(src)
        ins.poison = src.storage.poison if fine is not True else None
        if ins.data:
            access.array(dst)[...] = access.array(src).transpose(order).copy()
        access.mark(dst, fine if fine is True else np.asarray(fine).transpose(order), WRITTEN, ins.poison)
    return _record(ins, dst, src, constants.DMA_TRANSPOSE_SHARE["sbuf" if src.on_chip else "hbm"])


def _check_hardware_transpose(op: str, src: NkiTensor) -> None:
    need(src.itemsize == 2, "dma-transpose", f"{op} by hwdge of {src.dtype}, must have 2 bytes")
    need(src.shape[-1] <= 128, "dma-transpose", f"{op} by hwdge: last dimension {src.shape[-1]}, limit 128")
    first = src.shape[0]
    legal = first == 16 if src.ndim == 2 else first in (1, 2, 4, 8, 16) and first * src.shape[-2] % 16 == 0
    need(legal, "dma-transpose", f"{op} by hwdge of {list(src.shape)}")


def _check_gather_transpose(op: str, src: NkiTensor, dge: Any) -> None:
    index = src.dynamic.index  # type: ignore[union-attr]
    need_generation(3, f"{op} with an index per row")
    need(dge in (enums.dge_mode.unknown, enums.dge_mode.swdge), "dma-transpose", f"{op} with an index per row by {dge}")
    need(
        src.itemsize == 2 and src.shape[-1] <= 128,
        "dma-transpose",
        f"{op} gathers {src}: 2 bytes and a last dimension up to 128",
    )
    need(src.shape[0] % 16 == 0, "dma-transpose", f"{op} gathers {src.shape[0]} rows, must be a multiple of 16")
    need(
        src.ndim < 4 or 1 in src.shape[1:3],
        "dma-transpose",
        f"{op} gathers {list(src.shape)}: dimension 1 or 2 must be 1",
    )
    need(
        index.dtype == "uint32" and index.ndim == 2,
        "dma-transpose",
        f"{op}: index {index} must be uint32 with two dimensions",
    )
    rows, columns = index.shape
    legal = 16 <= rows <= 128 and rows % 16 == 0 and (columns == 1 or rows == 128) and index.size >= src.shape[0]
    need(legal, "dma-transpose", f"{op}: index of {list(index.shape)} for {src.shape[0]} rows")


def _gather_transpose(ins: Instruction, dst: NkiTensor, src: NkiTensor, order: tuple[int, ...], skip: bool) -> None:
    if not ins.data:
        access.check_usable(src.dynamic.index, "the index")  # type: ignore[union-attr]
        access.mark(dst, True, WRITTEN)
        return
    addresses, inside = access.gather_addresses(src, skip)
    line = access.as_line(src)
    fine = access.usable(line)
    back = np.argsort(order)  # rows out of bounds keep what dst has
    before = access.usable(dst)
    values = access.array(dst).transpose(back).copy()
    states = np.ones(src.shape, bool) if before is True else np.asarray(before).transpose(back).copy()
    rows = addresses[inside]
    values[inside] = access.array(line)[rows].reshape(-1, *src.shape[1:])
    states[inside] = True if fine is True else np.asarray(fine)[rows].reshape(-1, *src.shape[1:])
    access.array(dst)[...] = values.transpose(order)
    access.mark(dst, True if states.all() else states.transpose(order), WRITTEN, src.storage.poison)


def dma_compute(
    dst: NkiTensor,
    srcs: Sequence[NkiTensor],
    reduce_op: Any,
    scales: Sequence[float] | None = None,
    unique_indices: bool = True,
    oob_mode: Any = enums.oob_mode.error,
    name: str | None = None,
) -> Handle:
    """dst = sum of srcs in float32; with an index per row, a read-modify-write of dst."""
    op = "dma_compute"
    member(oob_mode, enums.oob_mode, op)
    need(token(reduce_op).name == "add", "operator", f"{op} with {reduce_op}; only nl.add")
    need(
        scales is None or (len(scales) == len(srcs) and all(s == 1.0 for s in scales)),
        "argument",
        f"{op}: scales {scales} must be 1.0",
    )
    need(1 <= len(srcs) <= 16, "limit", f"{op} of {len(srcs)} tensors, limit 16")
    dst, srcs = _side(op, dst, "dst"), [_side(op, s, f"srcs[{i}]") for i, s in enumerate(srcs)]
    for s in srcs:
        need(s.size == dst.size, "shape", f"{op}: {list(s.shape)} into {list(dst.shape)}")
    indexed = [s for s in srcs if _is_vector(s)]
    skip = oob_mode is enums.oob_mode.skip
    if indexed or _is_vector(dst):
        need(
            len(srcs) == 2 and len(indexed) == 1,
            "argument",
            f"{op} with an index takes two tensors, one of them indexed",
        )
        need(unique_indices, "argument", f"{op}: unique_indices must be True")
    else:
        need(not skip, "argument", f"{op}: oob_mode.skip without an index")
    ins = Instruction(op, "dma", name)
    ins.reads += srcs
    ins.writes.append(dst)
    if indexed:
        _read_modify_write(ins, dst, srcs, indexed[0], skip)
    else:
        _sum(ins, dst, srcs)
    bandwidth = constants.DMA_COMPUTE_SHARE[current().generation]
    return _record(ins, dst, srcs[-1], bandwidth)


def _sum(ins: Instruction, dst: NkiTensor, srcs: Sequence[NkiTensor]) -> None:
    fine: Any = True
    for s in srcs:
        known = access.usable(s)
        if known is not True:
            ins.poison = ins.poison or s.storage.poison
            known = np.asarray(known).reshape(dst.shape)
            fine = known if fine is True else fine & known
    if ins.data:
        total = widen(access.array(srcs[0])).reshape(dst.shape)
        for s in srcs[1:]:
            total = total + widen(access.array(s)).reshape(dst.shape)
        access.array(dst)[...] = round_to(total, dst.dtype)
    access.mark(dst, fine, WRITTEN, ins.poison)


def _read_modify_write(ins: Instruction, dst: NkiTensor, srcs: Sequence[NkiTensor], indexed: NkiTensor, skip: bool) -> None:
    other = srcs[0] if srcs[1] is indexed else srcs[1]
    rows = indexed.shape[0]
    if not ins.data:
        access.check_usable(indexed.dynamic.index, "the index")  # type: ignore[union-attr]
        return
    addresses, inside = access.gather_addresses(indexed, skip)
    line = access.as_line(indexed)
    known = access.usable(line)
    if (known is not True and not np.asarray(known)[addresses[inside]].all()) or access.usable(other) is not True:
        refuse("uninitialised", f"{ins.op} adds data that nothing wrote")
    picked = addresses[inside]
    if len(np.unique(picked)) != picked.size:
        refuse("argument", f"{ins.op}: the indices are not unique")
    total = widen(access.array(line)[picked]) + widen(access.array(other)).reshape(rows, -1)[inside]
    if _is_vector(dst):
        need(dst.storage is indexed.storage, "argument", f"{ins.op}: the indexed source must be dst")
        access.array(line)[picked] = round_to(total, dst.dtype)
        dst.storage.written = True
        return
    need(other.storage is dst.storage and other.offset == dst.offset, "argument", f"{ins.op}: one source must be dst")
    values = access.array(dst).reshape(rows, -1).copy()
    values[inside] = round_to(total, dst.dtype)
    access.array(dst)[...] = values.reshape(dst.shape)
    access.mark(dst, True, WRITTEN)
