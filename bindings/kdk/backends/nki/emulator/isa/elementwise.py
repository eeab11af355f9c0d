"""Element-wise instructions of VectorE, ScalarE and GpSimdE: copies, fills, ALU operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cost.records import elementwise, stream
from ..dtypes import NUMPY, is_integer, is_packed, round_to
from ..errors import need, refuse
from ..memory import ON_CHIP, PSUM, SBUF
from ..operators import Operator
from ..tensor import NkiTensor
from . import enums
from .common import Instruction, alu, as_storage, choose, meet, need_generation, need_integers, unsigned
from .common import NkiInstruction as Handle

COMPUTE = ("vector", "scalar", "gpsimd")


def tensor_copy(dst: NkiTensor, src: NkiTensor, engine: Any = enums.engine.unknown, name: str | None = None) -> Handle:
    """dst = src; bit exact between equal dtypes, through float32 otherwise."""
    ins = Instruction("tensor_copy", choose(engine, COMPUTE, "vector", "tensor_copy"), name)
    if ins.engine == "scalar":
        need_generation(3, "tensor_copy on ScalarE")
    dst = ins.out(dst, indirect=ins.engine != "gpsimd", packed=True)
    src = ins.tile(src, "src", indirect=ins.engine != "gpsimd", packed=True)
    if is_packed(src.dtype) or is_packed(dst.dtype):
        need(src.dtype == dst.dtype, "dtype", f"tensor_copy {src.dtype} to {dst.dtype}")
    ins.same(dst, src)
    ins.move(dst, src, ins.usable(src))
    return ins.done(stream(dst.per_partition, ins.engine, dst, src))


def memset(dst: NkiTensor, value: Any, engine: Any = enums.engine.unknown, name: str | None = None) -> Handle:
    """dst[...] = value, a constant of the kind of dst."""
    ins = Instruction("memset", choose(engine, ("vector", "gpsimd"), "vector", "memset"), name)
    dst = ins.out(dst, packed=True)
    if isinstance(value, NkiTensor) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"memset: value={value!r}; it must be a number known while tracing")
    if is_packed(dst.dtype):
        need(value == 0, "dtype", f"memset of {dst.dtype} with {value}; packed types take 0 only")
    elif is_integer(dst.dtype):
        need(isinstance(value, (int, np.integer)), "dtype", f"memset {value!r} into {dst.dtype}; pass an int")
        limits = np.iinfo(NUMPY[dst.dtype])
        need(limits.min <= value <= limits.max, "dtype", f"memset {value} into {dst.dtype}")
    if ins.data:
        exact = is_integer(dst.dtype) or is_packed(dst.dtype)
        fill = np.asarray(int(value)).astype(NUMPY[dst.dtype]) if exact else round_to(np.float32(value).reshape(1, 1), dst.dtype)
        ins.put(dst, np.reshape(fill, (1, 1)), True, raw=True)
    else:
        ins.put(dst, None, True)
    half = value == 0 and dst.itemsize == 2
    return ins.done(elementwise(dst.per_partition, ins.engine, 0.5 if half else 1.0))


def tensor_copy_predicated(dst: NkiTensor, src: Any, predicate: NkiTensor, reverse_pred: bool = False, name: str | None = None) -> Handle:
    """dst = src where predicate, else dst."""
    op = "tensor_copy_predicated"
    ins = Instruction(op, "vector", name)
    dst = ins.out(dst, indirect=True)
    predicate = ins.tile(predicate, "predicate", indirect=True)
    ins.same(dst, predicate)
    need(
        predicate.dtype in ("uint8", "uint16", "uint32", "bool_"),
        "dtype",
        f"{op}: predicate is {predicate.dtype}, must be unsigned",
    )
    value: Any = None
    fine: Any = True
    if isinstance(src, NkiTensor):
        src = ins.tile(src, "src")
        ins.same(dst, src)
        ins.not_both_psum(src, predicate)
        need(src.dtype == dst.dtype, "dtype", f"{op}: {src.dtype} into {dst.dtype}")
        fine = ins.usable(src)
        value = ins.raw(src) if ins.data else None
    elif ins.data:
        number, _ = ins.vector(src, dst.partitions, "src")
        value = round_to(np.reshape(number, (1, 1)), dst.dtype)
    ins.reads.append(dst)
    kept, known = ins.usable(dst), ins.usable(predicate)
    if not ins.data:
        ins.put(dst, None, meet(fine, known))  # without data, a choice by value is taken to pick usable elements
    else:
        chosen = (ins.raw(predicate) != 0) ^ reverse_pred
        usable = True if fine is True and kept is True else np.where(chosen, fine, kept)
        ins.put(dst, np.where(chosen, value, ins.raw(dst)), meet(usable, known), raw=True)
    factor = 1.0 if PSUM in (predicate.buffer, getattr(src, "buffer", None)) else 2.0
    return ins.done(elementwise(dst.per_partition, factor=factor))


def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Any,
    engine: Any = enums.engine.unknown,
    name: str | None = None,
) -> Handle:
    """dst = data1 op data2, without broadcasting."""
    (op,), bits = alu("tensor_tensor", op)
    need(op.kind != "unary", "operator", f"tensor_tensor with the unary {op}")
    tiles = (dst, data1, data2)
    for t in tiles:
        if not isinstance(t, NkiTensor):
            raise TypeError(f"tensor_tensor: operand {t!r}; numbers go through tensor_scalar")
    exact = all(t.dtype in ("int32", "uint32") for t in tiles)
    default = "gpsimd" if op.name == "power" or (exact and all(t.buffer is SBUF for t in tiles)) else "vector"
    ins = Instruction("tensor_tensor", choose(engine, ("vector", "gpsimd"), default, "tensor_tensor"), name)
    need(op.name != "power" or ins.engine == "gpsimd", "operator", "tensor_tensor: nl.power exists on GpSimdE only")
    need(
        not bits or exact or engine is enums.engine.unknown or ins.engine == "vector",
        "engine",
        "bit operators run on VectorE",
    )
    dst = ins.out(dst, indirect=True)
    data1, data2 = ins.tile(data1, "data1", indirect=True), ins.tile(data2, "data2")
    ins.same(dst, data1, data2)
    ins.not_both_psum(data1, data2)
    fine = meet(ins.usable(data1), ins.usable(data2))
    if bits:
        need_integers("tensor_tensor", dst, data1, data2)
    if not ins.data:
        ins.put(dst, None, fine)
    elif bits:
        ins.put(dst, as_storage(op.function(unsigned(ins.raw(data1)), unsigned(ins.raw(data2))), dst), fine, raw=True)
    elif exact and ins.engine == "gpsimd":
        ins.put(dst, _integer_arithmetic(op, ins.raw(data1), ins.raw(data2), dst.dtype), fine, raw=True)
    else:
        ins.put(dst, op.compute(ins.f32(data1), ins.f32(data2)), fine)
    return ins.done(elementwise(dst.per_partition, ins.engine, _tensor_tensor_factor(ins, op, dst, data1, data2)))


def _integer_arithmetic(op: Operator, a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    """32-bit integers on GpSimdE are exact; overflow wraps (not verified)."""
    with np.errstate(all="ignore"):
        return op.function(a.astype(np.int64), b.astype(np.int64)).astype(np.int64).astype(NUMPY[dtype])  # type: ignore[misc]


def _tensor_tensor_factor(ins: Instruction, op: Operator, dst: NkiTensor, data1: NkiTensor, data2: NkiTensor) -> float:
    if PSUM in (data1.buffer, data2.buffer):
        return 1.0
    half = all(t.buffer is SBUF and t.itemsize == 2 for t in (dst, data1, data2))
    if ins.core.generation >= 3:
        return 1.0 if half else 2.0
    plain = op.name in ("add", "subtract", "multiply") and all(t.dtype == "bfloat16" and t.is_contiguous() for t in (dst, data1, data2))
    return 1.0 if plain else 2.0


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Any = enums.engine.unknown,
    name: str | None = None,
) -> Handle:
    """dst = (data op0 operand0) op1 operand1; operands are numbers or (P, 1) tiles."""
    ops, bits = alu("tensor_scalar", op0, op1)
    need(
        op1 is not None or (operand1 is None and not reverse1),
        "argument",
        "tensor_scalar: operand1 or reverse1 without op1",
    )
    names = tuple(o.name for o in ops)
    ins = Instruction("tensor_scalar", _tensor_scalar_engine(names, bits, engine), name)
    dst, data = ins.out(dst, indirect=True), ins.tile(data, "data", indirect=True)
    ins.same(dst, data)
    if bits:
        need_integers("tensor_scalar", dst, data)
    fine = ins.usable(data)
    x: Any = (unsigned(ins.raw(data)) if bits else ins.f32(data)) if ins.data else None
    for o, operand, reverse in zip(ops, (operand0, operand1), (reverse0, reverse1)):
        if o.kind == "unary" or o.name == "invert":
            need(
                operand is None or (not isinstance(operand, NkiTensor) and operand == 0),
                "argument",
                f"tensor_scalar: {o} takes no operand",
            )
            value = None
        else:
            value, known = (_bit_operand if bits else _operand)(ins, operand, dst, x)
            fine = meet(fine, known)
        if ins.data and bits:
            x = o.function(value, x) if reverse else o.function(x, value)  # type: ignore[misc]
        elif ins.data:
            x = o.compute(x, value, reverse)
    ins.put(dst, None if x is None else as_storage(x, dst) if bits else x, fine, raw=bits)
    return ins.done(stream(dst.per_partition, ins.engine, dst, data))


def _tensor_scalar_engine(names: tuple[str, ...], bits: bool, engine: Any) -> str:
    need("power" not in names, "operator", "tensor_scalar with nl.power: it exists as tensor_tensor on GpSimdE only")
    for op in ("square", "relu"):
        if op in names:
            need_generation(4, f"tensor_scalar with nl.{op}")
    chosen = choose(engine, COMPUTE, "gpsimd" if "rsqrt" in names else "vector", "tensor_scalar")
    need(chosen == "vector" or not bits, "engine", f"tensor_scalar: bit operators run on VectorE, not {chosen}")
    need(
        (chosen == "gpsimd") == ("rsqrt" in names),
        "operator",
        f"tensor_scalar {names} on {chosen}; GpSimdE has rsqrt and nothing else has it",
    )
    if chosen == "scalar" and names not in (("multiply", "add"), ("multiply",), ("add",)):
        refuse("operator", f"tensor_scalar {names} on ScalarE; it has multiply, add, and multiply then add")
    return chosen


def _operand(ins: Instruction, operand: Any, dst: NkiTensor, _: Any) -> tuple[Any, Any]:
    return ins.vector(operand, dst.partitions, "operand")


def _bit_operand(ins: Instruction, operand: Any, dst: NkiTensor, x: Any) -> tuple[Any, Any]:
    if isinstance(operand, NkiTensor):
        operand = ins.tile(operand, "operand")
        ins.fits(operand, dst.partitions, 1, "operand")
        need_integers("tensor_scalar", operand)
        fine = ins.usable(operand)
        return (ins.raw(operand).astype(np.int64).astype(x.dtype) if ins.data else None), fine
    if isinstance(operand, bool) or not isinstance(operand, (int, np.integer)):
        refuse("dtype", f"tensor_scalar: operand {operand!r} of a bit operator must be an int")
    return (np.asarray(int(operand)).astype(x.dtype) if ins.data else None), True


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> Handle:
    """dst = (data op0 operand0) op1 operand1, where operand0 is per partition and operand1 a tile."""
    (op0, op1), bits = alu("scalar_tensor_tensor", op0, op1)
    need(not bits, "operator", "scalar_tensor_tensor with bit operators")
    need("power" not in (op0.name, op1.name), "operator", "scalar_tensor_tensor with nl.power")
    ins = Instruction("scalar_tensor_tensor", "vector", name)
    dst, data, operand1 = ins.out(dst), ins.tile(data, "data"), ins.tile(operand1, "operand1")
    ins.same(dst, data, operand1)
    ins.not_both_psum(data, operand1)
    value, known = (None, True) if op0.kind == "unary" else ins.vector(operand0, dst.partitions, "operand0", float32=False)
    fine = meet(ins.usable(data), ins.usable(operand1), known)
    x = None
    if ins.data:
        x = op1.compute(op0.compute(ins.f32(data), value, reverse0), ins.f32(operand1), reverse1)
    ins.put(dst, x, fine)
    quick = op0.name == "subtract" and op1.name == "multiply" and dst.per_partition % 2 == 0
    quick = quick and data.dtype == operand1.dtype == "bfloat16"
    return ins.done(elementwise(dst.per_partition, factor=1.0 if quick else 2.0))


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Handle:
    """dst = 1 / data on VectorE."""
    from ..operators import OPERATORS

    ins = Instruction("reciprocal", "vector", name)
    dst, data = ins.out(dst), ins.tile(data, "data", ON_CHIP)
    ins.same(dst, data)
    fine = ins.usable(data)
    ins.put(dst, OPERATORS["reciprocal"].compute(ins.f32(data)) if ins.data else None, fine)
    return ins.done(elementwise(dst.per_partition, factor=8.0))
