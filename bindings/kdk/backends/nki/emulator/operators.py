"""Operators: tokens of the instructions and, called on tiles, functions of nki.language. All arithmetic is float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import refuse

Function = Callable[..., Any]


class Operator:
    """`kind`: "binary", "unary" (arithmetic ALU), "bits" (ALU on raw integers), "activation" (ScalarE only), "none".

    `identity` starts a reduction; `activation` is what ScalarE computes; `domain` is where it is valid.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        function: Function | None,
        *,
        identity: float | None = None,
        activation: Function | None = None,
        domain: tuple[float, float] | None = None,
        reduces: bool = False,
    ) -> None:
        self.name, self.kind, self.function = name, kind, function
        self.identity, self.domain, self.reduces = identity, domain, reduces
        self.activation = function if kind == "activation" else activation
        self.as_function: Function | None = None  # set by nki.language

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.as_function is None:
            raise TypeError(f"{self} is an operator of instructions, not a function")
        return self.as_function(*args, **kwargs)

    def compute(self, a: Any, b: Any = None, reverse: bool = False) -> np.ndarray:
        """The arithmetic in float32."""
        with np.errstate(all="ignore"):
            if self.kind == "unary":
                result = self.function(a)  # type: ignore[misc]
            else:
                result = self.function(b, a) if reverse else self.function(a, b)  # type: ignore[misc]
        return result.astype(np.float32, copy=False)


OPERATORS: dict[str, Operator] = {}


def _add(name: str, kind: str, function: Function | None, **settings: Any) -> None:
    OPERATORS[name] = Operator(name, kind, function, **settings)


def _as_float(compare: Function) -> Function:
    return lambda a, b: compare(a, b).astype(np.float32)


def _logical(combine: Function) -> Function:
    return lambda a, b: combine(np.not_equal(a, 0), np.not_equal(b, 0)).astype(np.float32)


def _shift(direction: Function) -> Function:
    """Logical shift on unsigned bits; a distance of the width or more gives 0 (not verified)."""

    def shift(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        width = np.asarray(a).dtype.itemsize * 8
        return np.where(b < width, direction(a, np.minimum(b, width - 1)), 0).astype(np.asarray(a).dtype)

    return shift


def _exactly(formula: Function) -> Function:
    """A formula in float64, rounded once: the hardware has a table for it, of unpublished accuracy.

    (NumPy's float32 functions are off by several units in the last place on some CPUs.)

    At infinities it gives what the formula gives (NaN for silu of minus infinity), which is not documented.
    """

    def rounded(x: np.ndarray, *parameters: Any) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.asarray(formula(np.asarray(x, np.float64), *parameters)).astype(np.float32)

    return rounded


_add("add", "binary", np.add, identity=0.0, reduces=True)
_add("subtract", "binary", np.subtract, identity=0.0, reduces=True)
_add("multiply", "binary", np.multiply, identity=1.0, reduces=True)
_add("maximum", "binary", np.maximum, identity=-np.inf, reduces=True)
_add("minimum", "binary", np.minimum, identity=np.inf, reduces=True)
_add("power", "binary", _exactly(np.power))
_add("abs_max", "binary", lambda a, b: np.where(np.abs(a) > np.abs(b), a, b), identity=0.0)
_add("abs_min", "binary", lambda a, b: np.where(np.abs(a) < np.abs(b), a, b), identity=np.inf)
for _name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"):
    _add(_name, "binary", _as_float(getattr(np, _name)))
for _name in ("logical_and", "logical_or", "logical_xor"):
    _add(_name, "binary", _logical(getattr(np, _name)), reduces=True)
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    _add(_name, "bits", getattr(np, _name), reduces=True)
_add("left_shift", "bits", _shift(np.left_shift))
_add("right_shift", "bits", _shift(np.right_shift))
_add("invert", "bits", lambda a, b=None: np.invert(a))
_add("bypass", "none", None)
_add("average", "none", None)
for _name in ("divide", "mod", "fmod"):
    _add(_name, "none", None)


def erf(x: np.ndarray) -> np.ndarray:
    """Error function in float64 (SciPy's when it is there, the same values without)."""
    try:
        from scipy.special import erf as vectorised
    except ImportError:
        vectorised = np.frompyfunc(math.erf, 1, 1)
    return np.asarray(vectorised(x)).astype(np.float64)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _density(x: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _normal(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + erf(x * math.sqrt(0.5)))


def _silu(x: np.ndarray, slope: float = 1.0) -> np.ndarray:
    return x * sigmoid(slope * x)


def _silu_dx(x: np.ndarray, slope: float = 1.0) -> np.ndarray:
    s = sigmoid(slope * x)
    return s * (1 + slope * x * sigmoid(-slope * x))  # 1 - s would cancel


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, 0)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


_TABLES: dict[str, Function] = {
    "exp": np.exp,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "erf": erf,
    "erf_dx": lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x),
    "softplus": _softplus,
    "silu": _silu,
    "silu_dx": _silu_dx,
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "gelu": lambda x: x * _normal(x),
    "gelu_dx": lambda x: _normal(x) + x * _density(x),
    "gelu_apprx_tanh": _gelu_tanh,
    "gelu_apprx_sigmoid": lambda x: _silu(x, 1.702),
    "gelu_apprx_sigmoid_dx": lambda x: _silu_dx(x, 1.702),
}
for _name, _function in _TABLES.items():
    _add(_name, "activation", _exactly(_function))
_add("copy", "activation", lambda x: x)
_add("sign", "activation", np.sign)
_add("prelu", "activation", lambda x, slope=0.0: np.where(x >= 0, x, x * slope))
_add("log", "activation", _exactly(np.log), domain=(2.0**-64, 2.0**64))
_add("sin", "activation", _exactly(np.sin), domain=(-3.1415927, 3.1415927))
_add("arctan", "activation", _exactly(np.arctan), domain=(-1.5707964, 1.5707964))
_add("sqrt", "activation", np.sqrt, domain=(2.0**-116, 2.0**118))
_add("square", "unary", np.square, activation=np.square)
_add("relu", "unary", lambda x: np.maximum(x, 0), activation=lambda x: np.maximum(x, 0))
_add("abs", "unary", np.abs, activation=np.abs)
_rsqrt = _exactly(lambda x: 1 / np.sqrt(x))
_add("rsqrt", "unary", _rsqrt, activation=_rsqrt, domain=(2.0**-87, 2.0**97))
_add("reciprocal", "unary", lambda x: 1 / x, activation=lambda x: 1 / x, domain=(2.0**-42, 2.0**42))


def inside_domain(op: Operator, x: np.ndarray) -> bool | np.ndarray:
    """Where the activation is valid. NaN passes (it shows), and the exact zero of sqrt."""
    if op.domain is None:
        return True
    low, high = op.domain
    inside = (x >= low) & (x <= high)
    if op.name == "reciprocal":
        inside = (np.abs(x) >= low) & (np.abs(x) <= high)
    inside |= np.isnan(x)
    if op.name == "sqrt":
        inside |= x == 0
    return True if inside.all() else inside


def token(op: Any) -> Operator:
    """An operator given as such, or as nl.max and nl.min (functions of the language, documented as reduce_op)."""
    if isinstance(op, Operator):
        return op
    reduces_with = getattr(op, "reduces_with", None)
    if reduces_with:
        return OPERATORS[reduces_with]
    return refuse("operator", f"{op!r} is not an operator of nki.language")
