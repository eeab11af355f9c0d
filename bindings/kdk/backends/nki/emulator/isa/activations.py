"""ScalarE: activation functions with a scale and bias before them and a reduction after them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..access import Usable
from ..cost.constants import ACCUMULATOR_READ_CYCLES
from ..cost.records import elementwise
from ..errors import call_site, need, refuse
from ..operators import OPERATORS, Operator, inside_domain, token
from ..tensor import NkiTensor
from . import enums
from .accumulators import accumulate
from .common import Instruction, meet, member, need_generation
from .common import NkiInstruction as Handle


def activation(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Any = enums.reduce_cmd.idle,
    name: str | None = None,
) -> Handle:
    """dst = op(data * scale + bias); the accumulator of ScalarE may sum dst along the free dimensions."""
    op = token(op)
    need(op.activation is not None and op.name != "prelu", "operator", f"activation with {op}")
    ins = Instruction("activation", "scalar", name)
    member(reduce_cmd, enums.reduce_cmd, ins.op)
    need(reduce_cmd is not enums.reduce_cmd.load_reduce, "argument", "activation: reduce_cmd.load_reduce is for VectorE")
    dst, data = ins.out(dst, indirect=True), ins.tile(data, "data", indirect=True)
    ins.same(dst, data)
    factor, known = ins.vector(scale, dst.partitions, "scale")
    fine = meet(ins.usable(data), known)
    shift: Any = None
    if bias is not None:
        if not isinstance(bias, NkiTensor):
            need_generation(3, "activation with a scalar bias")
        elif bias.dtype == "tfloat32":
            refuse("dtype", "activation: bias is tfloat32")
        shift, known = ins.vector(bias, dst.partitions, "bias", float32=False)
        fine = meet(fine, known)
    x = None
    if ins.data:
        x = ins.f32(data)
        with np.errstate(all="ignore"):
            x = x * factor if isinstance(scale, NkiTensor) or scale != 1.0 else x
            x = x if shift is None else x + shift
    return _finish(ins, op, dst, x, fine, reduce_op, reduce_res, reduce_cmd, ("add",))


def _finish(
    ins: Instruction,
    op: Operator,
    dst: NkiTensor,
    x: Any,
    fine: Usable,
    reduce_op: Any,
    reduce_res: Any,
    reduce_cmd: Any,
    reductions: tuple[str, ...],
    slope: Any = None,
) -> Handle:
    """Apply the function, write, and reduce what was computed (before its rounding)."""
    y = None
    if ins.data:
        inside = inside_domain(op, x)
        if inside is not True:
            ins.poison = ins.poison or ("domain", call_site())
            fine = meet(fine, inside)
        with np.errstate(all="ignore"):
            y = (op.activation(x) if slope is None else op.activation(x, slope)).astype(np.float32, copy=False)  # type: ignore[misc]
    ins.put(dst, y, fine)
    if reduce_cmd is not enums.reduce_cmd.idle or reduce_res is not None:
        reduction = OPERATORS["add"] if reduce_op is None else token(reduce_op)
        need(
            reduction.name in reductions,
            "operator",
            f"{ins.op} reduces with {reduction}; it has {', '.join(reductions)}",
        )
        accumulate(ins, reduction, y, fine, reduce_cmd, reduce_res)
    elif reduce_op is not None:
        need(token(reduce_op).name in reductions, "operator", f"{ins.op} reduces with {reduce_op}")
    read = ACCUMULATOR_READ_CYCLES if reduce_res is not None else 0
    return ins.done(elementwise(dst.per_partition) + read)


def activation_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    reduce_op: Any,
    reduce_res: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    name: str | None = None,
) -> Handle:
    """activation with reset_reduce; the older spelling."""
    return activation(dst, op, data, bias, scale, reduce_op, reduce_res, enums.reduce_cmd.reset_reduce, name)


STAGES = {
    ("multiply", "add"),
    ("multiply", "subtract"),
    ("multiply", "bypass"),
    ("add", "bypass"),
    ("subtract", "bypass"),
    ("bypass", "bypass"),
}


def activate2(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    imm0: Any,
    imm1: Any,
    op0: Any,
    op1: Any,
    relu_param: Any = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Any = enums.reduce_cmd.idle,
    name: str | None = None,
) -> Handle:
    """dst = op((data op0 imm0) op1 imm1), gen4."""
    need_generation(4, "activate2")
    op, op0, op1 = token(op), token(op0), token(op1)
    need(op.activation is not None, "operator", f"activate2 with {op}")
    need((op0.name, op1.name) in STAGES, "operator", f"activate2 with ({op0}, {op1})")
    ins = Instruction("activate2", "scalar", name)
    member(reduce_cmd, enums.reduce_cmd, ins.op)
    dst, data = ins.out(dst, indirect=True), ins.tile(data, "data", indirect=True)
    ins.same(dst, data)
    fine = ins.usable(data)
    x: Any = ins.f32(data) if ins.data else None
    for stage, value, reverse, what in ((op0, imm0, reverse0, "imm0"), (op1, imm1, reverse1, "imm1")):
        if stage.name == "bypass":
            need(not reverse, "argument", f"activate2: reverse of a bypassed {what}")
            continue
        number, known = ins.vector(value, dst.partitions, what, float32=False)
        fine = meet(fine, known)
        x = stage.compute(x, number, reverse) if ins.data else None
    slope = None
    if op.name == "prelu":
        slope, known = ins.vector(relu_param, dst.partitions, "relu_param", float32=False)
        fine = meet(fine, known)
    reductions = ("add", "maximum", "minimum", "abs_max", "abs_min")
    return _finish(ins, op, dst, x, fine, reduce_op, reduce_res, reduce_cmd, reductions, slope)
