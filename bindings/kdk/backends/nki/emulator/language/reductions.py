"""nki.language: reductions over the last free dimensions, and the functions built from them."""

from __future__ import annotations

import math
from typing import Any

from .. import isa
from ..allocation import allocate
from ..operators import OPERATORS
from ..tensor import NkiTensor


def _axes(x: NkiTensor, axis: Any) -> list[int]:
    return sorted(a % x.ndim for a in ([axis] if isinstance(axis, int) else axis))


def _reduce(op: str, x: NkiTensor, axis: Any, dtype: Any, keepdims: bool) -> NkiTensor:
    axes = _axes(x, axis)
    if keepdims:
        shape = tuple(1 if d in axes else n for d, n in enumerate(x.shape))
    else:
        shape = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    t = allocate(shape if len(shape) > 1 else (*shape, 1), dtype or x.dtype)
    isa.tensor_reduce(t, OPERATORS[op], x, axes)
    return t


def sum(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    return _reduce("add", x, axis, dtype, keepdims)


def prod(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    return _reduce("multiply", x, axis, dtype, keepdims)


def max(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    return _reduce("maximum", x, axis, dtype, keepdims)


def min(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    return _reduce("minimum", x, axis, dtype, keepdims)


# documented as reduce_op of instructions too
max.reduces_with = "maximum"  # type: ignore[attr-defined]
min.reduces_with = "minimum"  # type: ignore[attr-defined]


def all(x: NkiTensor, axis: Any, dtype: Any = None) -> NkiTensor:
    return _reduce("logical_and", x, axis, dtype, False)


def mean(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    total = _reduce("add", x, axis, "float32", keepdims)
    t = allocate(total.shape, dtype or x.dtype)
    isa.tensor_scalar(t, total, OPERATORS["multiply"], total.size / x.size)
    return t


def var(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = True) -> NkiTensor:
    """Population variance; the reduced dimensions stay, whatever keepdims says (as the vendor documents)."""
    count = math.prod(x.shape[a] for a in _axes(x, axis))
    groups = x.size // x.shape[0] // count
    centre = mean(x, axis, "float32", keepdims=True)
    spread = allocate((x.shape[0], groups, count), "float32")
    rows = x.reshape((x.shape[0], groups, count))
    wide = centre.reshape((x.shape[0], groups, 1)).broadcast(2, count)
    isa.tensor_tensor(spread, rows, wide, OPERATORS["subtract"])
    isa.activation(spread, OPERATORS["square"], spread)
    total = allocate(centre.shape, "float32")
    isa.tensor_reduce(total.reshape((x.shape[0], groups)), OPERATORS["add"], spread, [2])
    t = allocate(centre.shape, dtype or x.dtype)
    isa.tensor_scalar(t, total, OPERATORS["multiply"], 1.0 / count)
    return t


def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """exp(x - max) / sum over all free dimensions."""
    axes = [a % x.ndim for a in ([axis] if isinstance(axis, int) else axis)]
    if axes != list(range(1, x.ndim)):
        raise NotImplementedError(f"nl.softmax over {axis} of {list(x.shape)}: the emulator has it over all free dimensions")
    top, powers = allocate((x.shape[0], 1), "float32"), allocate(x.shape, "float32")
    total = allocate((x.shape[0], 1), "float32")
    isa.tensor_reduce(top, OPERATORS["maximum"], x, axes, negate=True)
    isa.activation(
        powers,
        OPERATORS["exp"],
        x,
        bias=top,
        reduce_op=OPERATORS["add"],
        reduce_res=total,
        reduce_cmd=isa.reduce_cmd.reset_reduce,
    )
    isa.reciprocal(total, total)
    t = allocate(x.shape, dtype or x.dtype)
    isa.tensor_scalar(t, powers, OPERATORS["multiply"], total)
    return t


def rms_norm(
    x: NkiTensor, w: NkiTensor, axis: Any, n: int, epsilon: float = 1e-06, dtype: Any = None, compute_dtype: Any = None
) -> NkiTensor:
    """x / sqrt(sum(x * x) / n + epsilon) * w over all free dimensions."""
    if [a % x.ndim for a in ([axis] if isinstance(axis, int) else axis)] != list(range(1, x.ndim)):
        raise NotImplementedError(f"nl.rms_norm over {axis} of {list(x.shape)}: the emulator has it over all free dimensions")
    kind = compute_dtype or "float32"
    squares, total = allocate(x.shape, kind), allocate((x.shape[0], 1), "float32")
    isa.activation(
        squares,
        OPERATORS["square"],
        x,
        reduce_op=OPERATORS["add"],
        reduce_res=total,
        reduce_cmd=isa.reduce_cmd.reset_reduce,
    )
    isa.activation(total, OPERATORS["rsqrt"], total, scale=1.0 / n, bias=epsilon)
    t = allocate(x.shape, dtype or x.dtype)
    isa.scalar_tensor_tensor(t, x, OPERATORS["multiply"], total, OPERATORS["multiply"], w)
    return t
