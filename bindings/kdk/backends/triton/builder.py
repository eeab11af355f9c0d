"""The builder of the simulator: what Triton's semantic calls to make a value, on NumPy arrays.

It is Triton's interpreter's builder with its own number formats, dot and answers about the target on top, the repairs
that the installed release needs below them, and the tracking of pointers for the sanitizer around all.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from kdk.errors import SimulationError

from .formats import Array, bits, convert, fused_multiply_add, handle, is_small, numpy_dtype, to_tf32, widen
from .repair import needed_repairs
from .tracking import Tracking, lanes


def _convert_float(data: Array, source: Any, target: Any, rounding_mode: Any) -> Array:
    """Takes the place of the interpreter's function of this name: bit patterns of `target`."""
    return bits(convert(data.view(numpy_dtype(source)), numpy_dtype(target), _is_toward_zero(rounding_mode)))


def _is_toward_zero(rounding_mode: Any) -> bool:
    from triton._C.libtriton import ir

    return rounding_mode == ir.ROUNDING_MODE.RTZ


def replacements() -> dict[tuple[Any, str], Any]:
    """Functions of Triton's interpreter and language to replace during a launch."""
    from triton.runtime import interpreter as stock

    tl = _language()
    return {
        (stock, "_get_np_dtype"): numpy_dtype,
        (stock, "_convert_float"): _convert_float,
        (tl.dtype, "to_ir"): _to_ir,
        (tl.tensor, "__index__"): lambda tensor: int(tensor.handle.data.item()),  # int() of an array fails in NumPy 2.4
    }


def _to_ir(kind: Any, builder: Any) -> Any:
    """The interpreter's types are Triton's own; as the compiler's function of this name, refuse what a target lacks."""
    if kind.name.startswith("fp8") and kind.name not in builder.options.supported_fp8_dtypes:
        raise SimulationError(
            "KDK-TRITON-FP8",
            f"{builder.session.name} has no such 8-bit float",
            value=str(kind),
            limit=f"it has {', '.join(builder.options.supported_fp8_dtypes)}",
        )
    return kind


_Builder: Any = object  # the classes are mixed into Triton's InterpreterBuilder


class _Target(_Builder):
    """Not a repair: the builder answers for the target (options, smallest dot, fp8 types) where Triton's would
    accept everything."""

    def __init__(self, session: Any, options: Any, sanitizer: Any) -> None:
        super().__init__()
        self.session, self.sanitizer = session, sanitizer
        # Outside debug mode it doubles the work of integer operations and reports nothing; the sanitizer does better.
        self.options = dataclasses.replace(options, sanitize_overflow=bool(options.debug))
        smallest = session.backend.get_codegen_implementation(options)["min_dot_size"]
        self.codegen_fns["min_dot_size"] = functools.partial(_check_dot, smallest, session.name)

    def create_inline_asm(self, *_: Any) -> Any:
        raise SimulationError(
            "KDK-TRITON-ASM", "inline assembly cannot be simulated", way_out="write it with tl functions for the simulator"
        )


def _language() -> Any:
    import triton.language as tl

    return tl


def _check_dot(smallest: Any, target: str, left: Any, right: Any) -> tuple[int, int, int]:
    m, n, k = smallest(left, right)
    if left.shape[-2] < m or right.shape[-1] < n or left.shape[-1] < k:
        raise SimulationError(
            "KDK-TRITON-DOT",
            f"tl.dot of {left.scalar} blocks too small for {target}",
            value=f"{_sizes(left)} x {_sizes(right)}",
            limit=f"M >= {m}, N >= {n}, K >= {k}",
            way_out="make the block larger and mask it, or use tl.sum(a[:, :, None] * b[None, :, :], 1)",
        )
    return m, n, k


def _sizes(block: Any) -> list[int]:
    return [int(size) for size in block.shape]


class _SmallFloats(_Builder):
    """bfloat16 and the 8-bit floats as ml_dtypes arrays: casts, arithmetic, memory. Not conditional: the arrays are
    another representation than Triton's bit patterns, right or wrong."""

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        return handle(convert(src.data, numpy_dtype(dst_type)), dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return handle(convert(src.data, numpy_dtype(dst_type), _is_toward_zero(rounding_mode)), dst_type)

    def get_bf16(self, value: float) -> Any:
        return handle(convert(np.array([value]), numpy_dtype(_language().bfloat16)), _language().bfloat16)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        if not is_small(lhs.data):
            return super().binary_op(lhs, rhs, op)
        return handle(_rounded(op(widen(lhs.data), widen(rhs.data)), lhs.data.dtype), lhs.dtype)

    def unary_op(self, arg: Any, op: Any) -> Any:
        return handle(_rounded(op(widen(arg.data)), arg.data.dtype), arg.dtype)

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if op is np.where or not is_small(other.data):
            return super().ternary_op(lhs, rhs, other, op)
        return handle(_rounded(op(widen(lhs.data), widen(rhs.data), widen(other.data)), other.data.dtype), other.dtype)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype.itemsize > 2:
            return super().create_fma(x, y, z)
        return handle(fused_multiply_add(x.data, y.data, z.data), z.dtype)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *policy: Any, **named: Any) -> Any:
        kind = ptrs.get_element_ty()
        dtype = numpy_dtype(kind)
        fill = np.zeros(ptrs.data.shape, dtype) if other is None else np.broadcast_to(other.data, ptrs.data.shape)
        raw = np.dtype(f"u{dtype.itemsize}")
        data = _memory().load(ptrs.data, lanes(mask, ptrs.data.shape), np.ascontiguousarray(fill).view(raw), raw)
        return handle(data.view(dtype), kind)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *policy: Any, **named: Any) -> Any:
        data = np.broadcast_to(value.data.astype(numpy_dtype(ptrs.get_element_ty()), copy=False), ptrs.data.shape)
        return _memory().store(ptrs.data, np.ascontiguousarray(bits(data)), lanes(mask, ptrs.data.shape))

    def create_atomic_rmw(self, operation: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if not is_small(val.data):
            return super().create_atomic_rmw(operation, ptr, val, mask, sem, scope)
        return _add_lane_by_lane(self, operation, ptr, val, mask)


def _rounded(result: Array, dtype: np.dtype[Any]) -> Array:
    return result if result.dtype == np.bool_ else result.astype(dtype)


@functools.cache
def _memory() -> Any:
    from triton._C.libtriton import interpreter

    return interpreter


def _add_lane_by_lane(builder: Any, operation: Any, ptr: Any, val: Any, mask: Any) -> Any:
    """atomic_add (and exchange) of small floats: lanes that hit one address follow each other, each sum rounded."""
    from triton._C.libtriton import ir

    active = lanes(mask, ptr.data.shape).ravel()
    addresses, values = ptr.data.ravel(), np.broadcast_to(val.data, ptr.data.shape).ravel()
    old = np.zeros(values.shape, values.dtype)
    waiting = np.flatnonzero(active)
    while waiting.size:
        _, first = np.unique(addresses[waiting], return_index=True)
        turn = waiting[first]
        place, every = type(ptr)(addresses[turn], ptr.dtype), np.ones(turn.shape, np.bool_)
        found = _SmallFloats.create_masked_load(builder, place, every, None).data
        new = values[turn]
        if operation != ir.ATOMIC_OP.XCHG:
            new = _rounded(widen(found) + widen(new), found.dtype)
        _SmallFloats.create_masked_store(builder, place, handle(new, val.dtype), every)
        old[turn] = found
        waiting = np.delete(waiting, first)
    return handle(old.reshape(ptr.data.shape), val.dtype)


class _Dot(_Builder):
    """tl.dot: products exact, sums in float32, float32 operands read as TF32 unless the kernel asks for more."""

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: int) -> Any:
        from triton._C.libtriton import ir

        left, right, dtype = widen(a.data), widen(b.data), d.data.dtype
        if left.dtype == np.float32 and a.dtype.scalar == _language().float32 and input_precision == ir.INPUT_PRECISION.TF32:
            left, right = to_tf32(left), to_tf32(right)
        wide: Any = np.float64 if left.dtype.kind in "iu" or left.dtype == np.float64 else np.float32
        product = np.matmul(left.astype(wide), right.astype(wide))
        if dtype.kind in "iu":
            return handle(product.astype(dtype) + d.data, d.dtype)
        return handle((product + widen(d.data).astype(wide)).astype(dtype), d.dtype)

    def create_dot_scaled(
        self, lhs: Any, lhs_scale: Any, lhs_format: Any, rhs: Any, rhs_scale: Any, rhs_format: Any, *rest: Any
    ) -> Any:
        _, lhs_k_pack, rhs_k_pack, acc = rest
        left = _scaled(lhs, lhs_scale, lhs_format, lhs_k_pack, False)
        right = _scaled(rhs, rhs_scale, rhs_format, rhs_k_pack, True)
        return handle(np.matmul(left, right) + acc.data, _language().float32)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _scaled(value: Any, scale: Any, kind: Any, k_pack: bool, is_rhs: bool) -> Array:
    """An operand of tl.dot_scaled in float32: two E2M1 numbers to a byte, low half first; one E8M0 scale to a group
    along K."""
    from triton._C.libtriton import ir

    data = value.data
    if kind == ir.ScaleDotElemTypeTY.E2M1:
        axis = (-2 if k_pack else -1) if is_rhs else (-1 if k_pack else -2)
        bytes_last = np.moveaxis(bits(data), axis, -1)
        pairs = np.stack([_E2M1[bytes_last & 15], _E2M1[bytes_last >> 4]], -1)
        data = np.moveaxis(pairs.reshape(*bytes_last.shape[:-1], -1), -1, axis)
    data = widen(data).astype(np.float32)
    if scale is None:
        return data
    exponents = bits(scale.data).astype(np.int32)
    factors = np.where(exponents == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponents - 127))
    k = data.shape[-2 if is_rhs else -1]
    factors = np.repeat(factors, k // factors.shape[-1], axis=-1)
    return data * (np.swapaxes(factors, -1, -2) if is_rhs else factors)


@functools.cache
def builder_class() -> type:
    """Made once: which repairs are needed does not change while the process runs."""
    from triton.runtime.interpreter import InterpreterBuilder

    return type("Builder", (Tracking, _Target, _SmallFloats, _Dot, *needed_repairs(), InterpreterBuilder), {})
