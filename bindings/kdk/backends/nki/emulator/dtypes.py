"""Dtypes: their names, their NumPy storage, and the one rounding from float32."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .errors import need

INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32", "bool_")
FP8 = ("float8_e4m3", "float8_e4m3fn", "float8_e5m2")
PACKED = {
    "float8_e5m2_x4": ml_dtypes.float8_e5m2,
    "float8_e4m3fn_x4": ml_dtypes.float8_e4m3fn,
    "float4_e2m1fn_x4": ml_dtypes.float4_e2m1fn,
}

NUMPY: dict[str, np.dtype] = {name: np.dtype(name) for name in INTEGERS[:-1] + ("float16", "float32")}
NUMPY.update({name: np.dtype(getattr(ml_dtypes, name)) for name in FP8 + ("bfloat16", "float8_e8m0fnu")})
NUMPY.update(bool_=np.dtype("uint8"), tfloat32=np.dtype("float32"))
NUMPY.update(float8_e5m2_x4=np.dtype("uint32"), float8_e4m3fn_x4=np.dtype("uint32"), float4_e2m1fn_x4=np.dtype("uint16"))

ITEMSIZE = {name: dtype.itemsize for name, dtype in NUMPY.items()}


def dtype_name(dtype: Any) -> str:
    """The NKI name of a dtype given as NKI name or NumPy dtype."""
    if isinstance(dtype, str):
        name = dtype
    else:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = str(dtype)
    name = "bool_" if name == "bool" else name
    need(name in NUMPY, "dtype", f"dtype {name!r} does not exist (NKI has no 64-bit types)")
    return name


def is_packed(name: str) -> bool:
    return name in PACKED


def is_integer(name: str) -> bool:
    return name in INTEGERS


def is_float(name: str) -> bool:
    return name not in INTEGERS and name not in PACKED


def round_to(x: np.ndarray, name: str) -> np.ndarray:
    """float32 values as storage values of a dtype: nearest even; integers saturate.

    Not documented, chosen here: NaN becomes 0 in an integer, and float8 overflow follows ml_dtypes (infinity where the
    format has one, NaN otherwise).
    """
    if name == "float32":
        return x
    if name in INTEGERS:
        limits = np.iinfo(NUMPY[name])
        exact = np.rint(np.asarray(x, np.float64))
        return np.clip(np.where(np.isnan(exact), 0, exact), limits.min, limits.max).astype(NUMPY[name])
    if name == "tfloat32":
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        rounded = ((bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)).view(np.float32)
        return np.where(np.isfinite(x), rounded, x)
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(NUMPY[name])


def widen(x: np.ndarray) -> np.ndarray:
    """Storage values as float32; exact except for 32-bit integers."""
    return x.astype(np.float32, copy=False)
