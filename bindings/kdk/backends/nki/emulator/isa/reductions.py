"""VectorE: reductions, scans, statistics, and the instructions that use its accumulator registers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cost.constants import ACCUMULATOR_READ_CYCLES
from ..cost.records import elementwise
from ..dtypes import NUMPY, is_float
from ..errors import need, refuse
from ..operators import OPERATORS, Operator, token
from ..tensor import NkiTensor
from . import enums
from .accumulators import accumulate
from .common import Instruction, alu, meet, need_float, need_generation, need_integers
from .common import NkiInstruction as Handle

FP32_MIN = -3.4028234663852886e38
BN_STATS_MOST = 512


def tensor_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    axis: Any,
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> Handle:
    """dst = op over the last free dimensions of data."""
    (op,), bits = alu("tensor_reduce", op)
    need(op.reduces, "operator", f"tensor_reduce with {op}")
    need(not (bits and negate), "argument", "tensor_reduce: negate with a bit operator")
    ins = Instruction("tensor_reduce", "vector", name)
    dst, data = ins.out(dst, indirect=True), ins.tile(data, "data", indirect=True)
    length = _reduced_length(data, axis)
    ins.fits(dst, data.partitions, data.per_partition // length, f"dst of {list(data.shape)} over {axis}")
    if keepdims:
        kept = data.shape[: data.ndim - len(_axes(data, axis))] + (1,) * len(_axes(data, axis))
        need(
            dst.shape == kept or dst.ndim < data.ndim,
            "shape",
            f"tensor_reduce: keepdims writes {kept}, dst is {dst.shape}",
        )
    fine = ins.usable(data)
    fine = True if fine is True else np.asarray(fine).reshape(data.partitions, -1, length).all(2)
    x = None
    if bits:
        need_integers("tensor_reduce", dst, data)
        if ins.data:
            folded = op.function.reduce(ins.raw(data).reshape(data.partitions, -1, length), axis=2)  # type: ignore[union-attr]
            x = folded.astype(NUMPY[dst.dtype])
    elif ins.data:
        x = _reduce_arithmetic(op, ins.f32(data).reshape(data.partitions, -1, length))
        x = -x if negate else x
    ins.put(dst, x, fine, raw=bits)
    half = data.dtype == dst.dtype == "bfloat16" and op.name in ("add", "maximum")
    return ins.done(elementwise(data.per_partition, factor=0.5 if half else 1.0))


def _axes(data: NkiTensor, axis: Any) -> list[int]:
    given = [axis] if isinstance(axis, (int, np.integer)) else list(axis)
    return sorted(int(a) % data.ndim for a in given)


def _reduced_length(data: NkiTensor, axis: Any) -> int:
    axes = _axes(data, axis)
    legal = bool(axes) and axes == list(range(data.ndim - len(axes), data.ndim)) and axes[0] > 0
    need(legal, "axis", f"tensor_reduce over {axis} of {list(data.shape)}")
    return int(np.prod(data.shape[axes[0] :]))


def _reduce_arithmetic(op: Operator, x: np.ndarray) -> np.ndarray:
    """Combine the last dimension in float32."""
    if op.name == "logical_and":
        return (x != 0).all(2).astype(np.float32)
    if op.name == "logical_or":
        return (x != 0).any(2).astype(np.float32)
    if op.name == "logical_xor":
        return ((x != 0).sum(2) % 2).astype(np.float32)
    with np.errstate(all="ignore"):
        return op.function.reduce(x, axis=2, dtype=np.float32)  # type: ignore[union-attr]


def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: Any = enums.reduce_cmd.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> Handle:
    """dst = data op0 operand0; the accumulator reduces dst along the free dimensions."""
    (op0,), bits = alu("tensor_scalar_reduce", op0)
    reduction = token(reduce_op)
    need(not bits, "operator", "tensor_scalar_reduce with a bit operator")
    need(
        reduction.name in ("add", "multiply", "maximum", "minimum"),
        "operator",
        f"tensor_scalar_reduce reduces with {reduction}",
    )
    need(not reverse0, "argument", "tensor_scalar_reduce: reverse0 is not supported")
    need(
        reduce_cmd not in (enums.reduce_cmd.idle, enums.reduce_cmd.reset),
        "argument",
        f"tensor_scalar_reduce with {reduce_cmd}",
    )
    ins = Instruction("tensor_scalar_reduce", "vector", name)
    dst, data = ins.out(dst, indirect=True), ins.tile(data, "data", indirect=True)
    ins.same(dst, data)
    if op0.kind == "unary":
        need(operand0 is None or operand0 == 0, "argument", f"tensor_scalar_reduce: {op0} takes no operand")
        value, known = None, True
    else:
        value, known = ins.vector(operand0, dst.partitions, "operand0")
    fine = meet(ins.usable(data), known)
    x = op0.compute(ins.f32(data), value) if ins.data else None
    ins.put(dst, x, fine)
    accumulate(ins, reduction, x, fine, reduce_cmd, reduce_res, init=reduce_init, negate=reduce_res_negate)
    return ins.done(elementwise(dst.per_partition) + ACCUMULATOR_READ_CYCLES)


def tensor_scalar_cumulative(
    dst: NkiTensor,
    src: NkiTensor,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: Any = enums.reduce_cmd.reset_reduce,
    name: str | None = None,
) -> Handle:
    """dst[i] = r = op1(op0(src[i], imm0), r); r is the accumulator of VectorE."""
    n = "tensor_scalar_cumulative"
    (op0, op1), bits = alu(n, op0, op1)
    need(not bits, "operator", f"{n} with a bit operator")
    need(op1.name in ("add", "subtract", "multiply", "maximum", "minimum"), "operator", f"{n} accumulates with {op1}")
    ins = Instruction(n, "vector", name)
    dst, src = ins.out(dst, indirect=True), ins.tile(src, "src", indirect=True)
    ins.same(dst, src)
    for t in (dst, src):
        need(t.dtype not in ("int32", "uint32"), "dtype", f"{n}: {t.dtype} is not supported")
    start, known = _cumulative_start(ins, op1, imm1, reduce_cmd, dst.partitions)
    value, given = ins.vector(imm0, dst.partitions, "imm0")
    fine = meet(ins.usable(src), known, given)
    if fine is not True:
        fine = np.logical_and.accumulate(np.broadcast_to(fine, (dst.partitions, dst.per_partition)), 1)
    last = start
    out = None
    if ins.data:
        steps = np.ascontiguousarray(np.broadcast_to(op0.compute(ins.f32(src), value), (dst.partitions, dst.per_partition)).T)
        state = start.reshape(-1)
        out = np.empty_like(steps)
        for i, step in enumerate(steps):
            state = op1.compute(step, state)
            out[i] = state
        last, out = state[:, None], out.T
    ins.core.accumulators["vector"] = (last, True if fine is True else fine[:, -1:], op1.name)
    ins.put(dst, out, fine)
    return ins.done(elementwise(dst.per_partition, factor=2.0))


def _cumulative_start(ins: Instruction, op: Operator, imm1: Any, command: Any, partitions: int) -> tuple[np.ndarray, Any]:
    kind = enums.reduce_cmd
    if command is kind.reset_reduce:
        return np.full((partitions, 1), op.identity, np.float32), True
    if command is kind.load_reduce:
        need(imm1 is not None, "accumulator", f"{ins.op}: load_reduce without imm1")
        value, known = ins.vector(imm1, partitions, "imm1")
        return np.broadcast_to(np.float32(0) if value is None else value, (partitions, 1)), known
    need(command is kind.reduce, "argument", f"{ins.op} with {command}")
    state = ins.core.accumulators.get("vector")
    if state is None or state[0].shape[0] != partitions:
        refuse("accumulator", f"{ins.op}: the accumulator of vector holds nothing for {partitions} partitions")
    return state[0], state[1]


def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> Handle:
    """dst[i] = r = (data0[i] op0 r) op1 data1[i], starting from `initial`, in float32."""
    n = "tensor_tensor_scan"
    (op0, op1), bits = alu(n, op0, op1)
    need(not bits and op0.kind == op1.kind == "binary", "operator", f"{n} with ({op0}, {op1})")
    ins = Instruction(n, "vector", name)
    dst, data0, data1 = ins.out(dst), ins.tile(data0, "data0"), ins.tile(data1, "data1")
    ins.same(dst, data0, data1)
    ins.not_both_psum(data0, data1)
    start, known = ins.vector(initial, dst.partitions, "initial", float32=False)
    fine = meet(ins.usable(data0), ins.usable(data1), known)
    if fine is not True:
        fine = np.logical_and.accumulate(np.broadcast_to(fine, (dst.partitions, dst.per_partition)), 1)
    out = None
    if ins.data:
        a, b = np.ascontiguousarray(ins.f32(data0).T), np.ascontiguousarray(ins.f32(data1).T)
        state = np.broadcast_to(start, (dst.partitions, 1)).reshape(-1).astype(np.float32)
        out = np.empty_like(a)
        for i in range(dst.per_partition):
            state = op1.compute(op0.compute(a[i], state, reverse0), b[i], reverse1)
            out[i] = state
        out = out.T
    ins.put(dst, out, fine)
    return ins.done(elementwise(dst.per_partition, factor=2.0))


def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Handle:
    """Count, mean and variance * count of the even elements, then of the odd ones."""
    ins = Instruction("bn_stats", "vector", name)
    dst, data = ins.out(dst), ins.tile(data, "data")
    need(
        data.per_partition <= BN_STATS_MOST,
        "limit",
        f"bn_stats of {data.per_partition} elements, limit {BN_STATS_MOST}",
    )
    ins.fits(dst, data.partitions, 6, "dst")
    fine = ins.usable(data)
    x = None
    if ins.data:
        values, columns = ins.f32(data), []
        for part in (values[:, ::2], values[:, 1::2]):
            mean = part.mean(1, dtype=np.float32) if part.size else np.zeros(data.partitions, np.float32)
            spread = np.square(part - mean[:, None]).sum(1, dtype=np.float32)
            columns += [np.full(data.partitions, part.shape[1], np.float32), mean, spread]
        x = np.stack(columns, 1)
    ins.put(dst, x, True if fine is True else np.asarray(fine).all(1, keepdims=True))
    return ins.done(elementwise(data.per_partition))


def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Handle:
    """Mean and variance from any number of (count, mean, variance * count)."""
    ins = Instruction("bn_aggr", "vector", name)
    dst, data = ins.out(dst), ins.tile(data, "data")
    need(data.per_partition % 3 == 0, "shape", f"bn_aggr of {data.per_partition} elements, not a multiple of 3")
    ins.fits(dst, data.partitions, 2, "dst")
    fine = ins.usable(data)
    x = None
    if ins.data:
        count, mean, spread = np.moveaxis(ins.f32(data).reshape(data.partitions, -1, 3), 2, 0)
        total = count.sum(1)
        with np.errstate(all="ignore"):
            centre = (count * mean).sum(1) / total
            variance = (spread + count * np.square(mean - centre[:, None])).sum(1) / total
        x = np.stack([centre, variance], 1)
    ins.put(dst, x, True if fine is True else np.asarray(fine).all(1, keepdims=True))
    return ins.done(elementwise(data.per_partition / 3, factor=13.0))


def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Any,
    comp_op1: Any,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: Any = enums.reduce_cmd.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Any = OPERATORS["maximum"],
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> Handle:
    """dst = on_true_tile where index comp_op0 bound0 and index comp_op1 bound1, else FP32_MIN; row maximum."""
    n = "range_select"
    need_generation(3, n)
    need(token(reduce_op).name == "maximum", "operator", f"{n} reduces with {reduce_op}; only nl.maximum")
    need(
        np.float32(on_false_value) == np.float32(FP32_MIN),
        "limit",
        f"{n}: on_false_value {on_false_value}, must be {FP32_MIN}",
    )
    compare = [token(o) for o in (comp_op0, comp_op1)]
    legal = ("equal", "less", "less_equal", "greater", "greater_equal")
    need(all(o.name in legal for o in compare), "operator", f"{n} compares with {compare}")
    need(isinstance(range_start, (int, np.integer)), "argument", f"{n}: range_start {range_start!r} must be an int")
    ins = Instruction(n, "vector", name)
    dst, tile = ins.out(dst), ins.tile(on_true_tile, "on_true_tile")
    ins.same(dst, tile)
    need_float(n, tile, "on_true_tile")
    need(
        range_start + dst.per_partition <= 1 << 24,
        "limit",
        f"{n}: index {range_start + dst.per_partition} beyond 2**24",
    )
    for bound, what in ((bound0, "bound0"), (bound1, "bound1")):
        if not isinstance(bound, NkiTensor):
            raise TypeError(f"{n}: {what} must be a ({dst.partitions}, 1) tile")
    (low, known0), (high, known1) = (
        ins.vector(bound0, dst.partitions, "bound0"),
        ins.vector(bound1, dst.partitions, "bound1"),
    )
    fine, x = ins.usable(tile), None
    if ins.data:
        index = np.arange(range_start, range_start + dst.per_partition, dtype=np.float32)[None]
        chosen = (compare[0].compute(index, low) != 0) & (compare[1].compute(index, high) != 0)
        x = np.where(chosen, ins.f32(tile), np.float32(FP32_MIN))
        fine = True if fine is True else np.asarray(fine) | ~chosen
    fine = meet(fine if ins.data else True, known0, known1)
    ins.put(dst, x, fine)
    accumulate(ins, OPERATORS["maximum"], x, fine, reduce_cmd, reduce_res)
    return ins.done(elementwise(dst.per_partition))


def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: Any,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Any = enums.reduce_cmd.idle,
    reduce_op: Any = OPERATORS["maximum"],
    reverse_pred: bool = False,
    name: str | None = None,
) -> Handle:
    """dst = on_true where predicate else on_false; row maximum."""
    n = "select_reduce"
    need(token(reduce_op).name == "maximum", "operator", f"{n} reduces with {reduce_op}; only nl.maximum")
    ins = Instruction(n, "vector", name)
    dst, predicate, tile = ins.out(dst), ins.tile(predicate, "predicate"), ins.tile(on_true, "on_true")
    ins.same(dst, predicate, tile)
    ins.not_both_psum(tile, predicate)
    need(tile.dtype not in ("tfloat32", "int32", "uint32"), "dtype", f"{n}: on_true is {tile.dtype}")
    need(
        predicate.dtype in ("int8", "uint8", "int16", "uint16", "bool_"),
        "dtype",
        f"{n}: predicate is {predicate.dtype}",
    )
    if reduce_res is not None:
        need(is_float(reduce_res.dtype), "dtype", f"{n}: reduce_res is {reduce_res.dtype}")
    other, known = ins.vector(on_false, dst.partitions, "on_false", float32=False)
    fine, condition, x = ins.usable(tile), ins.usable(predicate), None
    if ins.data:
        chosen = (ins.raw(predicate) != 0) ^ reverse_pred
        x = np.where(chosen, ins.f32(tile), other)
        if fine is not True or known is not True:
            fine, known = np.where(chosen, fine, known), True
    fine = meet(fine, known, condition) if ins.data else condition
    ins.put(dst, x, fine)
    accumulate(ins, OPERATORS["maximum"], x, fine, reduce_cmd, reduce_res)
    return ins.done(elementwise(dst.per_partition))


def exponential(
    dst: NkiTensor,
    src: NkiTensor,
    max_value: Any = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Any = enums.reduce_cmd.idle,
    reduce_init: Any = 0.0,
    name: str | None = None,
) -> Handle:
    """dst = exp(src - max_value) on VectorE, gen4; the accumulator may sum dst."""
    n = "exponential"
    need_generation(4, n)
    need(reduce_cmd is not enums.reduce_cmd.reset, "argument", f"{n} with {reduce_cmd}")
    ins = Instruction(n, "vector", name)
    dst, src = ins.out(dst, indirect=True), ins.tile(src, "src", indirect=True)
    ins.same(dst, src)
    need(dst.dtype != "uint32" and src.dtype != "tfloat32", "dtype", f"{n}: {src.dtype} to {dst.dtype}")
    top, known = ins.vector(max_value, dst.partitions, "max_value")
    fine, x = meet(ins.usable(src), known), None
    if ins.data:
        with np.errstate(all="ignore"):
            x = OPERATORS["exp"].activation(ins.f32(src) - top)  # type: ignore[misc]
    ins.put(dst, x, fine)
    load = reduce_cmd is enums.reduce_cmd.load_reduce
    if not load and (isinstance(reduce_init, NkiTensor) or reduce_init != 0.0):
        refuse("accumulator", f"{n}: reduce_init without load_reduce")
    accumulate(ins, OPERATORS["add"], x, fine, reduce_cmd, reduce_res, init=reduce_init if load else None)
    return ins.done(elementwise(dst.per_partition, factor=0.25))
