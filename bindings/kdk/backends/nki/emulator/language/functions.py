"""nki.language: functions on tiles. Each allocates its result in SBUF and issues instructions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .. import isa
from ..allocation import allocate
from ..dtypes import is_float
from ..errors import need, refuse
from ..operators import OPERATORS, Operator
from ..tensor import NkiTensor
from .creation import copy

ONLY_SIMULATED = "only simulates in the vendor's package: no engine executes it"


def _result(x: NkiTensor, dtype: Any) -> NkiTensor:
    return allocate(x.shape, dtype or x.dtype)


def _unary(op: Operator) -> Callable[..., NkiTensor]:
    def function(x: NkiTensor, dtype: Any = None) -> NkiTensor:
        if not isinstance(x, NkiTensor):
            raise TypeError(f"nl.{op.name} of {x!r}: expected a tile")
        t = _result(x, dtype)
        if op.name in ("rsqrt", "invert"):
            isa.tensor_scalar(t, x, op, None)
        else:
            isa.activation(t, op, x)
        return t

    return function


def _binary(op: Operator) -> Callable[..., NkiTensor]:
    def function(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
        tile = x if isinstance(x, NkiTensor) else y
        if not isinstance(tile, NkiTensor):
            raise TypeError(f"nl.{op.name} of {x!r} and {y!r}: at least one must be a tile")
        if op.kind == "none" or (op.name == "power" and not (isinstance(x, NkiTensor) and isinstance(y, NkiTensor))):
            refuse("operator", f"nl.{op.name} of {_kind(x)} and {_kind(y)} {ONLY_SIMULATED}")
        t = _result(tile, dtype)
        if isinstance(x, NkiTensor) and isinstance(y, NkiTensor):
            need(x.shape == y.shape, "operator", f"nl.{op.name} of {list(x.shape)} and {list(y.shape)} {ONLY_SIMULATED}")
            isa.tensor_tensor(t, x, y, op)
        elif tile is x:
            isa.tensor_scalar(t, x, op, y)
        else:
            isa.tensor_scalar(t, y, op, x, reverse0=True)
        return t

    return function


def _kind(x: Any) -> str:
    return "a tile" if isinstance(x, NkiTensor) else "a number"


for _operator in OPERATORS.values():
    if _operator.name == "copy":
        _operator.as_function = copy
    elif _operator.name not in ("bypass", "average", "prelu"):
        unary = _operator.kind in ("unary", "activation") or _operator.name == "invert"
        _operator.as_function = _unary(_operator) if unary else _binary(_operator)


def sin(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Sine over all of float32: the argument is brought into [-pi, pi] first."""
    return _sine(x, 0.0, dtype)


OPERATORS["sin"].as_function = sin  # as a token it stays ScalarE's function, valid inside [-pi, pi] only


def cos(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    return _sine(x, math.pi / 2, dtype)


def _sine(x: NkiTensor, shift: float, dtype: Any) -> NkiTensor:
    """sin(x + shift) with x + shift - 2 pi round(...), rounding by a cast to an integer."""
    turns, whole = allocate(x.shape, "float32"), allocate(x.shape, "int32")
    reduced, t = allocate(x.shape, "float32"), _result(x, dtype)
    isa.tensor_scalar(turns, x, OPERATORS["add"], shift, op1=OPERATORS["multiply"], operand1=1 / (2 * math.pi))
    isa.tensor_copy(whole, turns)
    isa.tensor_copy(turns, whole)
    isa.tensor_scalar(reduced, x, OPERATORS["add"], shift)
    isa.scalar_tensor_tensor(reduced, turns, OPERATORS["multiply"], -2 * math.pi, OPERATORS["add"], reduced)
    limit = 3.1415925
    isa.tensor_scalar(reduced, reduced, OPERATORS["minimum"], limit, op1=OPERATORS["maximum"], operand1=-limit)
    isa.activation(t, OPERATORS["sin"], reduced)
    return t


def tan(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    above, below, t = sin(x, "float32"), cos(x, "float32"), _result(x, dtype)
    isa.reciprocal(below, below)
    isa.tensor_tensor(t, above, below, OPERATORS["multiply"])
    return t


def negative(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    t = _result(x, dtype)
    isa.tensor_scalar(t, x, OPERATORS["multiply"], -1.0)
    return t


def logical_not(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """x xor 1, so x should hold 0 and 1."""
    t = _result(x, dtype)
    isa.tensor_scalar(t, x, OPERATORS["logical_xor"], 1.0)
    return t


def _toward(x: NkiTensor, dtype: Any, compare: str, step: float) -> NkiTensor:
    """Round to an integer and correct by one where that went the wrong way. Exact for |x| < 2**31."""
    rounded, whole, wrong = allocate(x.shape, "float32"), allocate(x.shape, "int32"), allocate(x.shape, "float32")
    t = _result(x, dtype)
    isa.tensor_copy(whole, x)
    isa.tensor_copy(rounded, whole)
    isa.tensor_tensor(wrong, rounded, x, OPERATORS[compare])
    isa.scalar_tensor_tensor(t, wrong, OPERATORS["multiply"], step, OPERATORS["add"], rounded)
    return t


def floor(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    return _toward(x, dtype, "greater", -1.0)


def ceil(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    return _toward(x, dtype, "less", 1.0)


def trunc(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """sign(x) * floor(abs(x))."""
    size, direction = allocate(x.shape, "float32"), allocate(x.shape, "float32")
    isa.activation(size, OPERATORS["abs"], x)
    isa.activation(direction, OPERATORS["sign"], x)
    t = _result(x, dtype)
    isa.tensor_tensor(t, floor(size), direction, OPERATORS["multiply"])
    return t


def where(condition: NkiTensor, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """x where condition is not 0, else y."""
    mask = allocate(condition.shape, "uint8")
    isa.tensor_scalar(mask, condition, OPERATORS["not_equal"], 0.0)
    tile = x if isinstance(x, NkiTensor) else y if isinstance(y, NkiTensor) else condition
    t = allocate(condition.shape, dtype or tile.dtype)
    for value, reverse in ((y, True), (x, False)):
        if isinstance(value, NkiTensor):
            value = value if value.dtype == t.dtype else copy(value, t.dtype)
        isa.tensor_copy_predicated(t, value, mask, reverse_pred=reverse)
    return t


def dropout(x: NkiTensor, rate: Any, dtype: Any = None) -> NkiTensor:
    """Zero with probability `rate`, without rescaling."""
    t = allocate(x.shape, x.dtype)
    isa.dropout(t, x, rate)
    return t if dtype is None else copy(t, dtype)


def rand(shape: Any, dtype: Any, buffer: Any = None, name: str = "") -> NkiTensor:
    """Uniform values in [0, 1)."""
    bits, t = (
        allocate(shape, "uint32"),
        allocate(shape, dtype, **({} if buffer is None else {"buffer": buffer}), name=name),
    )
    need(is_float(t.dtype), "dtype", f"nl.rand of {t.dtype}")
    isa.rng(bits)
    isa.tensor_scalar(bits, bits, OPERATORS["right_shift"], 8)
    isa.tensor_scalar(t, bits, OPERATORS["multiply"], 2.0**-24)
    return t


def random_seed(seed: Any) -> None:
    """Seed VectorE's generator with a (1, 1) tile."""
    if not isinstance(seed, NkiTensor):
        refuse("operator", f"nl.random_seed({seed!r}) of a number {ONLY_SIMULATED}; pass a (1, 1) tile")
    isa.set_rng_seed(seed)
