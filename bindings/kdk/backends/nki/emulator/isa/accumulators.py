"""The accumulator registers of VectorE and ScalarE: one float32 per partition."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..access import Usable
from ..errors import need, refuse
from ..operators import Operator
from . import enums
from .common import Instruction, meet, member, rows


def accumulate(
    ins: Instruction,
    op: Operator,
    x: Any,
    fine: Usable,
    command: Any,
    result: Any = None,
    *,
    init: Any = None,
    negate: bool = False,
) -> None:
    """The reduce registers of an engine, one per partition. `None` stands for a state nobody may use."""
    member(command, enums.reduce_cmd, ins.op)
    registers, kind = ins.core.accumulators, enums.reduce_cmd
    partitions = ins.writes[0].partitions
    if command in (kind.reset, kind.reset_reduce):
        need(op.identity is not None, "operator", f"{ins.op} reduces with {op}")
        registers[ins.engine] = (np.full((partitions, 1), op.identity, np.float32), True, op.name)
    elif command is kind.load_reduce:
        need(init is not None, "accumulator", f"{ins.op}: load_reduce without an initial value")
        value, usable = ins.vector(init, partitions, "reduce_init")
        value = np.broadcast_to(np.float32(0) if value is None else value, (partitions, 1))
        registers[ins.engine] = (value, usable, op.name)
    elif command is kind.idle and ins.engine == "vector":
        registers[ins.engine] = None  # documented: idle may still change it
    if init is not None and command is not kind.load_reduce:
        refuse("accumulator", f"{ins.op}: an initial value without load_reduce")
    if command in (kind.reduce, kind.reset_reduce, kind.load_reduce):
        state = registers.get(ins.engine)
        if state is None or state[0].shape[0] != partitions:
            refuse("accumulator", f"{ins.op}: the accumulator of {ins.engine} holds nothing for {partitions} partitions")
        if state[2] != op.name:
            refuse("accumulator", f"{ins.op}: the accumulator was started with nl.{state[2]} and goes on with {op}")
        value = op.compute(state[0], reduce_rows(op, x)) if ins.data else state[0]
        registers[ins.engine] = (value, meet(state[1], rows(fine)), op.name)
    if result is not None:
        state = registers.get(ins.engine)
        if state is None:
            refuse("accumulator", f"{ins.op} reads the accumulator of {ins.engine}, which holds nothing")
        out = ins.out(result, "reduce_res")
        ins.fits(out, partitions, 1, "reduce_res")
        ins.put(out, (-state[0] if negate else state[0]) if ins.data else None, state[1])


def reduce_rows(op: Operator, x: np.ndarray) -> np.ndarray:
    """All elements of each row combined, in float32."""
    if op.name == "add":
        return x.sum(1, keepdims=True, dtype=np.float32)
    if op.name in ("abs_max", "abs_min"):
        at = (np.argmax if op.name == "abs_max" else np.argmin)(np.abs(x), axis=1)
        return np.take_along_axis(x, at[:, None], 1)
    return op.function.reduce(x, axis=1, keepdims=True, dtype=np.float32)  # type: ignore[union-attr]
