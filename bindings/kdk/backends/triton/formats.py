"""bfloat16 and the 8-bit floats in NumPy: arrays of ml_dtypes, and conversions that round once.

Triton's interpreter keeps these types as unsigned integers and computes on the bit patterns (triton#4972, #8322,
#11584).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from kdk.errors import SimulationError

Array = Any  # numpy arrays of any dtype, ml_dtypes' included


# Triton's name of each scalar type, and the NumPy dtype of its elements.
_DTYPES = {
    "int1": np.dtype(np.bool_),
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp8e4b8": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "fp8e5b16": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_SMALL = {_DTYPES[name] for name in ("bf16", "fp8e4nv", "fp8e5", "fp8e4b8", "fp8e5b16")}


def numpy_dtype(kind: Any) -> np.dtype[Any]:
    """The NumPy dtype that holds Triton's `kind` (a scalar, pointer or block type)."""
    scalar = kind.scalar
    if scalar.is_ptr():
        return np.dtype(np.uint64)
    dtype = _DTYPES.get(scalar.name)
    if dtype is None:
        raise SimulationError("KDK-TRITON-FORMAT", "the simulator has no such type", value=str(scalar))
    return dtype


def handle(data: Array, kind: Any) -> Any:
    """Triton's object for a value of scalar type `kind`."""
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(data, kind.scalar)


def is_small(array: Array) -> bool:
    return array.dtype in _SMALL


def widen(array: Array) -> Array:
    """float32 for the formats that NumPy cannot compute with; others as they are. Exact."""
    return array.astype(np.float32) if array.dtype in _SMALL else array


def bits(array: Array) -> Array:
    """The same bytes as unsigned integers."""
    return array.view(f"u{array.dtype.itemsize}")


def convert(array: Array, to: np.dtype[Any], toward_zero: bool = False) -> Array:
    """Round once: to nearest, ties to even, or toward zero. 8-bit floats saturate (cvt.rn.satfinite), the others
    overflow to infinity."""
    if to not in _SMALL:
        source = widen(array)
        result = source.astype(to)
    else:
        source = _narrow_to_f32(array)
        if to.itemsize == 1:
            largest = np.float32(ml_dtypes.finfo(to).max)
            source = np.clip(source, -largest, largest)  # keeps NaN
        result = source.astype(to)
    return _step_toward_zero(source, result) if toward_zero else result


def _narrow_to_f32(array: Array) -> Array:
    """float32, rounded to odd: a second rounding to at most 11 bits then gives what one rounding would have given."""
    if array.dtype.kind in "iub":
        array = array.astype(np.float64)
    if array.dtype != np.float64:
        return array.astype(np.float32)
    single = array.astype(np.float32)
    back = single.astype(np.float64)
    inexact = (back != array) & np.isfinite(back) & np.isfinite(array)
    even = (single.view(np.uint32) & 1) == 0
    toward = np.where(array > back, np.float32(np.inf), np.float32(-np.inf))
    return np.where(inexact & even, np.nextafter(single, toward), single)


def _step_toward_zero(source: Array, rounded: Array) -> Array:
    """Undo a rounding away from zero: one less in sign and magnitude. An overflow becomes the largest number."""
    away = np.abs(widen(rounded).astype(np.float64)) > np.abs(source.astype(np.float64))
    raw = bits(rounded)
    return np.where(away, raw - raw.dtype.type(1), raw).astype(raw.dtype).view(rounded.dtype)


def fused_multiply_add(x: Array, y: Array, z: Array) -> Array:
    """x * y + z of at most 32 bits, rounded once: the product is exact in float64, and the sum is rounded to odd."""
    a = x.astype(np.float64) * y.astype(np.float64)
    b = z.astype(np.float64)
    total = a + b
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)  # total + error is exact (two-sum)
    even = (total.view(np.int64) & 1) == 0
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error)
    toward = np.where(error > 0, np.inf, -np.inf)
    odd = np.where(inexact & even, np.nextafter(total, toward), total)
    return convert(odd, z.dtype) if z.dtype in _SMALL else odd.astype(z.dtype)


def to_tf32(array: Array) -> Array:
    """What a TF32 tensor core reads of a float32: the low 13 bits are ignored."""
    return (np.ascontiguousarray(array).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
