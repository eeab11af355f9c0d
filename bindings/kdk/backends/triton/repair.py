"""What Triton's interpreter computes differently from a GPU, put right.

Every repair is a class with the builder methods that it replaces and `needed(stock)`, which tries a builder on the
smallest case that shows the fault. A release of Triton that is right is left alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import libdevice
from .formats import bits, fused_multiply_add, handle, numpy_dtype
from .tracking import lanes

_Builder: Any = object  # the classes are mixed into Triton's InterpreterBuilder


class ExternalFunctions(_Builder):
    """libdevice and ocml functions, which Triton's interpreter does not have."""

    @staticmethod
    def needed(stock: Any) -> bool:
        kind = _language().float32
        one = handle(np.ones(1, np.float32), kind)
        return bool(stock.create_extern_elementwise("", "", "__nv_fabsf", [one], kind, True).data[0] != 1)

    def create_extern_elementwise(self, library: str, path: str, symbol: str, args: list[Any], kind: Any, is_pure: bool) -> Any:
        return handle(libdevice.call(symbol, [arg.data for arg in args], numpy_dtype(kind)), kind)


class FmaRoundsOnce(_Builder):
    """float32 fma multiplied and then added, rounding twice (before 3.9)."""

    @staticmethod
    def needed(stock: Any) -> bool:
        x, z = np.array([1 + 2.0**-12], np.float32), np.array([-1], np.float32)
        tl = _language()
        got = stock.create_fma(handle(x, tl.float32), handle(x, tl.float32), handle(z, tl.float32))
        return bool(got.data[0] != np.float32(2.0**-11 + 2.0**-24))

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype == np.float64:
            return handle(x.data * y.data + z.data, z.dtype)
        return handle(fused_multiply_add(x.data, y.data, z.data), z.dtype)


class MinMaxSkipNan(_Builder):
    """tl.maximum and tl.minimum return the number when one operand is NaN, unless asked to propagate it (before 3.9
    they did)."""

    @staticmethod
    def needed(stock: Any) -> bool:
        kind = _language().float32
        nan, one = handle(np.array([np.nan], np.float32), kind), handle(np.ones(1, np.float32), kind)
        return bool(np.isnan(stock.create_maxnumf(nan, one).data[0]))

    def create_minnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_clampf(self, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
        from triton._C.libtriton import ir

        if propagate_nans == ir.PROPAGATE_NAN.NONE:
            return self.create_minnumf(self.create_maxnumf(arg, lo), hi)
        return self.ternary_op(arg, lo, hi, np.clip)


class HighHalfIsUnsigned(_Builder):
    """tl.umulhi multiplies bit patterns; signed operands were multiplied as signed (before 3.9)."""

    @staticmethod
    def needed(stock: Any) -> bool:
        kind = _language().int32
        minus_one = handle(np.array([-1], np.int32), kind)
        return bool(stock.create_umulhi(minus_one, minus_one).data[0] != -2)

    def create_umulhi(self, lhs: Any, rhs: Any) -> Any:
        dtype = lhs.data.dtype
        wide: Any = object if dtype.itemsize == 8 else np.uint64
        high = (bits(lhs.data).astype(wide) * bits(rhs.data).astype(wide)) >> (8 * dtype.itemsize)
        return handle(high.astype(f"u{dtype.itemsize}").view(dtype), lhs.dtype)


class OneBitWraps(_Builder):
    """int1 is an integer of one bit, whose sum wraps; NumPy's booleans saturate (before 3.9)."""

    @staticmethod
    def needed(stock: Any) -> bool:
        true = handle(np.array([True]), _language().int1)
        return bool(stock.binary_op(true, true, np.add).data[0])

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.data.dtype != np.bool_ or rhs.data.dtype != np.bool_:
            return super().binary_op(lhs, rhs, op)
        return handle((op(lhs.data.astype(np.int8), rhs.data.astype(np.int8)) & 1).astype(np.bool_), lhs.dtype)


class HistogramBins(_Builder):
    """tl.histogram drops what lies outside the bins and counts in int32 (before 3.9: the last bin also got N)."""

    @staticmethod
    def needed(stock: Any) -> bool:
        data = handle(np.array([0, 2], np.int64), _language().int64)
        counts = stock.create_histogram(data, 2, None).data
        return counts.dtype != np.int32 or counts.tolist() != [1, 0]

    def create_histogram(self, data: Any, bins: int, mask: Any) -> Any:
        active = lanes(mask, data.data.shape) if mask is not None else np.ones(data.data.shape, np.bool_)
        values = data.data[active & (data.data >= 0) & (data.data < bins)].astype(np.int64)
        return handle(np.bincount(values, minlength=bins).astype(np.int32), _language().int32)


REPAIRS: tuple[Any, ...] = (
    ExternalFunctions,
    FmaRoundsOnce,
    MinMaxSkipNan,
    HighHalfIsUnsigned,
    OneBitWraps,
    HistogramBins,
)


def needed_repairs() -> list[Any]:
    """Those that the installed release of Triton needs."""
    from triton.runtime.interpreter import InterpreterBuilder

    stock = InterpreterBuilder()
    return [repair for repair in REPAIRS if fails(repair, stock)]


def fails(repair: Any, builder: Any) -> bool:
    """Whether a builder has the fault."""
    try:
        return repair.needed(builder)
    except Exception:  # it cannot even do the smallest case
        return True


def _language() -> Any:
    import triton.language as tl

    return tl
