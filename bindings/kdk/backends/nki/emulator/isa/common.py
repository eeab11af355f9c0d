"""What all instructions share: operand checks, reading, the one write, and the record in the trace."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from .. import access, lnc
from .. import strides as walk
from ..access import Usable
from ..core import current
from ..cost.constants import CLOCK_GHZ
from ..cost.records import Record
from ..dtypes import NUMPY, is_float, is_integer, is_packed, round_to, widen
from ..errors import call_site, need, refuse
from ..memory import ON_CHIP, PSUM, SBUF, WRITTEN
from ..objects import NKIObject
from ..operators import Operator, token
from ..tensor import NkiTensor
from . import enums

START_PARTITIONS = {32: (0, 32, 64, 96), 64: (0, 64), 96: (0,), 128: (0,)}
MOST_ELEMENTS, MOST_SIZE, MOST_STRIDE = 65536, 65535, 32767
FEW_PARTITIONS = 32
REACH = {"gpsimd": (SBUF,), "tensor": ON_CHIP, "vector": ON_CHIP, "scalar": ON_CHIP, "dma": (SBUF,)}


class NkiInstruction(NKIObject):
    """Handle of an issued instruction."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.loops = tuple(current().loops)

    def depends_on(self, *producers: NkiInstruction) -> NkiInstruction:
        """Wait for other instructions. The emulator issues in program order, so this only checks the loops."""
        for producer in producers:
            if not isinstance(producer, NkiInstruction):
                raise TypeError(f"depends_on({producer!r}): expected what an nki.isa call returned")
            need(
                self.loops[: len(producer.loops)] == producer.loops,
                "loop",
                "depends_on across the edge of a dynamic loop",
            )
            core = current()
            record = core.trace[self.handle]
            core.trace[self.handle] = record._replace(after=(*record.after, producer.handle))
        return self


def meet(*parts: Usable) -> Usable:
    """Which results are usable: True, or the conjunction of boolean arrays (P, N) or (P, 1)."""
    arrays = [p for p in parts if p is not True]
    if not arrays:
        return True
    result = arrays[0]
    for other in arrays[1:]:
        result = result & other
    return result


def rows(fine: Usable) -> Usable:
    """Per partition, whether everything is usable."""
    return True if fine is True else np.asarray(fine).all(1, keepdims=True)


def choose(given: Any, allowed: tuple[str, ...], default: str, op: str) -> str:
    """The engine an instruction runs on."""
    if not isinstance(given, enums.engine):
        refuse("removed", f"{op}: engine={given!r}; engines are nki.isa.engine members")
    name = default if given is enums.engine.unknown else given.name
    need(name in allowed, "engine", f"{op} on {name}; it runs on {', '.join(allowed)}")
    return name


def member(value: Any, kind: type[Enum], op: str) -> None:
    if not isinstance(value, kind):
        refuse("removed", f"{op}: {value!r} is not a member of nki.isa.{kind.__name__}")


def need_generation(least: int, what: str) -> None:
    if current().generation < least:
        refuse("generation", f"{what} needs gen{least}, this is gen{current().generation}")


def starts_legally(partitions: int, start: int) -> bool:
    return start in START_PARTITIONS[-(-partitions // 32) * 32]


class Instruction:
    """One instruction being issued."""

    def __init__(self, op: str, engine: str, name: str | None = None) -> None:
        self.op, self.engine, self.name = op, engine, name
        self.core = current()
        self.data = self.core.data
        self.reads: list[NkiTensor] = []
        self.writes: list[NkiTensor] = []
        self.poison: tuple[str, str] | None = None
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{op}: name={name!r}")

    # -- operands

    def tile(
        self,
        t: Any,
        what: str,
        memories: tuple = ON_CHIP,
        *,
        output: bool = False,
        indirect: bool = False,
        packed: bool = False,
        any_start: bool = False,
    ) -> NkiTensor:
        """Check one operand on chip and return it with its run-time offset applied."""
        if not isinstance(t, NkiTensor):
            raise TypeError(f"{self.op}: {what} must be a tensor, not {type(t).__name__}")
        if t.buffer not in memories or t.buffer not in REACH[self.engine]:
            reach = " or ".join(m.value for m in memories if m in REACH[self.engine])
            refuse("memory", f"{self.op}: {what} {t}; on {self.engine} it must be in {reach}")
        access.open_tile(t)
        view = access.resolve(t)
        assert view is not None
        self._check_pattern(view, what, any_start)
        if view.indirection is not None:
            need_generation(4, f"{self.op}: tensor indirection")
            need(indirect, "pattern", f"{self.op}: {what} cannot be an indirect view")
            self.reads.append(view.indirection.index)
        if is_packed(view.dtype) and not packed:
            refuse("dtype", f"{self.op}: {what} is {view.dtype}")
        (self.writes if output else self.reads).append(view)
        return view

    def out(self, t: Any, what: str = "dst", memories: tuple = ON_CHIP, **settings: bool) -> NkiTensor:
        return self.tile(t, what, memories, output=True, **settings)

    def _check_pattern(self, t: NkiTensor, what: str, any_start: bool) -> None:
        if t.partitions > 1 and t.strides[0] != t.row_elements:
            refuse("pattern", f"{self.op}: {what} {t} skips or repeats partitions")
        if not any_start and not starts_legally(t.partitions, t.start_partition):
            refuse("start-partition", f"{self.op}: {what} covers {t.partitions} partitions from {t.start_partition}")
        if t.per_partition > MOST_ELEMENTS:
            refuse("pattern", f"{self.op}: {what} {t} has {t.per_partition} elements per partition, limit {MOST_ELEMENTS}")
        if len(t.shape) > 2 or t.strides[-1] != 1:
            dims = walk.merge(t.shape[1:], t.strides[1:])
            if len(dims) > 4:
                refuse("pattern", f"{self.op}: {what} {t} has {len(dims)} free dimensions that cannot be merged, limit 4")
            for size, stride in dims:
                if size > MOST_SIZE or abs(stride) > MOST_STRIDE:
                    refuse(
                        "pattern",
                        f"{self.op}: {what} {t}: size {size}, limit {MOST_SIZE}; stride {stride}, limit {MOST_STRIDE}",
                    )

    def same(self, *tiles: NkiTensor) -> None:
        first = tiles[0]
        for t in tiles[1:]:
            if t.shape[0] != first.shape[0] or t.per_partition != first.per_partition:
                refuse("shape", f"{self.op}: " + " and ".join(str(list(x.shape)) for x in tiles))

    def fits(self, t: NkiTensor, partitions: int, elements: int, what: str) -> None:
        if (t.partitions, t.per_partition) != (partitions, elements):
            refuse("shape", f"{self.op}: {what} is {list(t.shape)}, expected ({partitions}, {elements})")

    def not_both_psum(self, a: NkiTensor, b: NkiTensor) -> None:
        if a.buffer is PSUM and b.buffer is PSUM:
            refuse("two-psum", f"{self.op}: both inputs are in PSUM")

    def vector(self, x: Any, partitions: int, what: str, *, float32: bool = True) -> tuple[Any, Usable]:
        """A scalar, or a (P, 1) tile, as (value, usable)."""
        if not isinstance(x, NkiTensor):
            if isinstance(x, bool) or not isinstance(x, (int, float, np.integer, np.floating)):
                raise TypeError(f"{self.op}: {what}={x!r}; expected a number or a ({partitions}, 1) tile")
            return np.float32(x), True
        x = self.tile(x, what)
        self.fits(x, partitions, 1, what)
        if float32 and x.dtype != "float32":
            refuse("dtype", f"{self.op}: {what} is {x.dtype}, must be float32")
        return self.f32(x) if self.data else None, self.usable(x)

    # -- values

    def raw(self, t: NkiTensor) -> np.ndarray:
        """Storage values as (P, N)."""
        if t.indirection is None:
            return access.array(t).reshape(t.partitions, -1)
        base = t.indirection.base
        return np.take_along_axis(access.array(base).reshape(base.partitions, -1), self.columns(t), 1)

    def f32(self, t: NkiTensor) -> np.ndarray:
        return widen(self.raw(t))

    def usable(self, t: NkiTensor) -> Usable:
        if t.indirection is not None:
            access.check_usable(t.indirection.index, "the index")
        fine = access.usable(t if t.indirection is None else t.indirection.base)
        if fine is True:
            return True
        self.poison = self.poison or t.storage.poison or ("uninitialised", call_site())
        fine = np.asarray(fine).reshape(t.partitions, -1)
        if t.indirection is not None:
            fine = np.take_along_axis(fine, self.columns(t), 1) if self.data else fine.all(1, keepdims=True)
        return fine

    def columns(self, t: NkiTensor) -> np.ndarray:
        """Offsets of an indirect view as (P, count): offset i of a group comes from index[i % G, i // G]."""
        assert t.indirection is not None
        index = access.array(t.indirection.index).astype(np.int64).reshape(t.partitions, -1)
        group = 32 if self.engine == "tensor" else 16
        blocks = [index[p : p + group].T.reshape(-1)[: t.indirection.count] for p in range(0, t.partitions, group)]
        width = t.indirection.base.per_partition
        for block in blocks:
            need(
                ((block >= 0) & (block < width)).all() and len(block) == t.indirection.count,
                "bounds",
                f"{self.op}: {t.indirection.count} indirect offsets into {width} elements",
            )
        return np.repeat(np.stack(blocks), group, axis=0)[: t.partitions]

    # -- results

    def put(self, t: NkiTensor, x: Any, fine: Usable, *, writer: int = WRITTEN, raw: bool = False) -> None:
        """The one write: float32 to round, or storage values, as (P, N) or what broadcasts to it."""
        if t.indirection is not None:
            self._scatter(t, x, fine, raw)
            return
        if x is not None:
            values = np.asarray(x) if raw else round_to(np.asarray(x), t.dtype)
            if values.ndim != len(t.shape) or values.shape != t.shape:
                values = np.broadcast_to(values, (t.partitions, t.per_partition)).reshape(t.shape)
            access.array(t)[...] = values
        if fine is not True:
            fine = np.broadcast_to(fine, (t.partitions, t.per_partition))
        access.mark(t, fine, writer, self.poison)

    def _scatter(self, t: NkiTensor, x: Any, fine: Usable, raw: bool) -> None:
        assert t.indirection is not None
        base = t.indirection.base
        access.check_usable(t.indirection.index, "the index")
        if x is None:
            return
        shape = (t.partitions, t.indirection.count)
        columns = self.columns(t)
        values = self.raw(base).copy()
        np.put_along_axis(values, columns, np.broadcast_to(np.asarray(x) if raw else round_to(np.asarray(x), t.dtype), shape), 1)
        before = access.usable(base)
        states = np.ones(values.shape, bool) if before is True else np.asarray(before).reshape(values.shape).copy()
        np.put_along_axis(states, columns, np.broadcast_to(fine, shape), 1)
        access.array(base)[...] = values.reshape(base.shape)
        access.mark(base, True if states.all() else states, WRITTEN, self.poison)

    def move(self, t: NkiTensor, source: NkiTensor, fine: Usable) -> None:
        """Bit exact between equal dtypes, through float32 otherwise."""
        if not self.data:
            self.put(t, None, fine)
        elif source.dtype == t.dtype:
            self.put(t, self.raw(source), fine, raw=True)
        else:
            self.put(t, self.f32(source), fine)

    def done(self, cycles: float, *, us: float | None = None, moved: int = 0, hbm: int = 0, flops: int = 0) -> NkiInstruction:
        """Append the record and return the handle."""
        core, operands = self.core, self.writes + self.reads
        access.touch(*operands)
        lnc.check_access(core, self.writes, self.reads)
        index = len(core.trace)
        if us is None:
            us = cycles / CLOCK_GHZ[core.generation][self.engine] / 1e3
        out = operands[0] if operands else None
        if out is not None and out.on_chip and out.partitions < FEW_PARTITIONS and out.per_partition >= FEW_PARTITIONS:
            core.lint(f"{self.op} uses {out.partitions} of 128 partitions and takes as long as with all", call_site())
        core.trace.append(
            Record(
                self.op,
                self.engine,
                self.name,
                out.partitions if out is not None and out.on_chip else 0,
                0 if out is None else out.per_partition if out.on_chip else out.size,
                tuple(t.dtype for t in operands),
                tuple(t.buffer._value_ for t in operands),
                moved,
                hbm,
                cycles,
                us,
                flops,
                self._dependencies(index),
                call_site(),
            )
        )
        return NkiInstruction(index)

    def _dependencies(self, index: int) -> tuple[int, ...]:
        """Earlier instructions that this one waits for: its data, and the buffers it overwrites."""
        core, before = self.core, set[int]()
        for place in [t.storage.placement for t in self.reads]:
            if place in core.writers:
                before.add(core.writers[place])
            core.readers.setdefault(place, []).append(index)
        for place in [t.storage.placement for t in self.writes]:
            before.update(core.readers.pop(place, ()))
            if place in core.writers:
                before.add(core.writers[place])
            core.writers[place] = index
        before.discard(index)
        return tuple(sorted(before))


# -- operators of an instruction


def alu(op_name: str, *ops: Any) -> tuple[list[Operator], bool]:
    """Operators as tokens, and whether they work on bits. One instruction uses one family."""
    tokens = [token(o) for o in ops if o is not None]
    for o in tokens:
        need(o.kind in ("binary", "unary", "bits"), "operator", f"{op_name} with {o}")
        if o.name in ("abs_max", "abs_min"):
            need_generation(4, f"{op_name} with {o}")
    if len({o.kind == "bits" for o in tokens}) > 1:
        refuse("operator", f"{op_name} mixes bit and arithmetic operators: {tokens}")
    return tokens, bool(tokens) and tokens[0].kind == "bits"


def need_integers(op: str, *tiles: NkiTensor) -> None:
    for t in tiles:
        if not is_integer(t.dtype):
            refuse("dtype", f"{op}: a bit operator on {t.dtype}")


def need_float(op: str, t: NkiTensor, what: str) -> None:
    if not is_float(t.dtype):
        refuse("dtype", f"{op}: {what} is {t.dtype}, must be a float")


def unsigned(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


def as_storage(bits: np.ndarray, t: NkiTensor) -> np.ndarray:
    """Bits as storage values of a tile: cut off or filled with zeros where the widths differ."""
    return bits.astype(f"u{t.itemsize}").view(NUMPY[t.dtype])
