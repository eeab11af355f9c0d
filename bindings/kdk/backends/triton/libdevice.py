"""The functions of triton.language.extra.libdevice in NumPy and SciPy.

In a compiled kernel those names stand for the functions of the target's library, NVIDIA's libdevice or AMD's ocml,
with the argument types that it has. The same tables choose the symbol here, so a kernel that passes float16 where
the library has no such function is refused here too.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from kdk.errors import SimulationError

from .formats import Array, convert, widen


def replacements(active: Any) -> dict[tuple[Any, str], Any]:
    """The stubs of triton.language.extra.libdevice, replaced by the target's functions."""
    from triton.language.extra import libdevice as stubs

    names = [name for name, value in vars(stubs).items() if callable(value) and not name.startswith("_")]
    return {(stubs, name): functools.partial(_of_target, active, name) for name in names}


def _of_target(active: Any, name: str, *args: Any, **_: Any) -> Any:
    session = active.semantic.builder.session
    vendor = importlib.import_module(f"triton.language.extra.{session.target.backend}.libdevice")
    function = getattr(vendor, name, None)
    if function is None:
        raise SimulationError("KDK-TRITON-LIBDEVICE", f"{session.name} has no libdevice.{name}")
    return function(*args, _semantic=active.semantic)


def call(symbol: str, args: list[Array], dtype: np.dtype[Any]) -> Array:
    """The library's function `symbol`, computed in float64 (integers as they are) and rounded once to `dtype`:
    the libraries themselves are accurate to one or two units in the last place, the fast variants to fewer bits."""
    function = _functions().get(_plain_name(symbol))
    if function is None:
        raise SimulationError(
            "KDK-TRITON-LIBDEVICE",
            "the simulator has no such library function",
            value=symbol,
            way_out="use a function of tl.math",
        )
    result = np.asarray(function(*[widen(a).astype(np.float64) if a.dtype.kind not in "iub" else a for a in args]))
    return result if result.dtype == dtype else convert(result, dtype)


def _plain_name(symbol: str) -> str:
    """`tanh` for __nv_tanhf, __nv_tanh, __nv_fast_tanhf and __ocml_tanh_f32."""
    name = re.sub(r"^__nv_(fast_)?|^__ocml_|_f(16|32|64)$", "", symbol)
    known = _functions()
    return name[:-1] if name not in known and name.endswith("f") and name[:-1] in known else name


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    from scipy import special

    def round_half_away(x: Array) -> Array:
        return np.copysign(np.floor(np.abs(x) + 0.5), x)

    one = [
        "sqrt",
        "cbrt",
        "sin",
        "cos",
        "tan",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sinh",
        "cosh",
        "tanh",
    ]
    one += [
        "floor",
        "ceil",
        "trunc",
        "rint",
        "isnan",
        "isinf",
        "signbit",
        "abs",
        "hypot",
        "copysign",
        "nextafter",
        "fmod",
        "ldexp",
    ]
    table: dict[str, Callable[..., Any]] = {name: getattr(np, name) for name in one}
    inverse = {
        "asin": "arcsin",
        "acos": "arccos",
        "atan": "arctan",
        "asinh": "arcsinh",
        "acosh": "arccosh",
        "atanh": "arctanh",
    }
    table.update({name: getattr(np, numpy) for name, numpy in inverse.items()})
    table.update({name: getattr(special, name) for name in ("erf", "erfc", "erfinv", "erfcx", "erfcinv", "j0", "j1", "y0", "y1")})
    table.update(
        fabs=np.abs,
        finite=np.isfinite,
        isfinited=np.isfinite,
        atan2=np.arctan2,
        pow=np.power,
        powi=np.power,
        fdim=lambda x, y: np.where(np.isnan(x) | np.isnan(y), np.nan, np.maximum(x - y, 0)),
        remainder=lambda x, y: x - y * np.rint(x / y),
        fma=lambda x, y, z: x * y + z,
        exp10=lambda x: np.power(10.0, x),
        rsqrt=lambda x: 1 / np.sqrt(x),
        rcbrt=lambda x: 1 / np.cbrt(x),
        rhypot=lambda x, y: 1 / np.hypot(x, y),
        sinpi=lambda x: np.sin(np.pi * np.remainder(x, 2)),
        cospi=lambda x: np.cos(np.pi * np.remainder(x, 2)),
        lgamma=special.gammaln,
        tgamma=special.gamma,
        normcdf=special.ndtr,
        normcdfinv=special.ndtri,
        ncdf=special.ndtr,
        ncdfinv=special.ndtri,
        cyl_bessel_i0=special.i0,
        cyl_bessel_i1=special.i1,
        saturate=lambda x: np.clip(np.nan_to_num(x), 0, 1),
        round=round_half_away,
        nearbyint=np.rint,
        fdivide=np.divide,
    )
    return table
