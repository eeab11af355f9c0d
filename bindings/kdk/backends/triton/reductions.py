"""tl.reduce and tl.associative_scan on whole arrays.

The combination function of a kernel is interpreted on half of the elements at a time, in the order of the axis,
which takes log2(N) calls where Triton's interpreter takes N; the rounding of every step is that of the element type,
as in a reduction tree of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .formats import Array, is_small, widen

# Triton's own combinations of two elements: interpreting them step by step would give the same, slower.
_OPERATIONS: dict[str, tuple[Any, Any]] = {  # for integers, for floats
    "_sum_combine": (np.add, np.add),
    "_prod_combine": (np.multiply, np.multiply),
    "_elementwise_max": (np.maximum, np.fmax),  # a NaN loses against a number, as in max.f32
    "_elementwise_min": (np.minimum, np.fmin),
    "_xor_combine": (np.bitwise_xor, None),
    "_or_combine": (np.bitwise_or, None),
}


def replacements() -> dict[tuple[Any, str], Any]:
    """Functions of triton.language to replace during a launch."""
    import triton.language as tl

    return {
        (owner, name): new for owner in (tl, tl.core) for name, new in (("reduce", reduce), ("associative_scan", associative_scan))
    }


def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: bool = False, **_: Any) -> Any:
    inputs = input if isinstance(input, tuple) else (input,)
    axis, keep_dims = _plain(axis), _plain(keep_dims)
    arrays = [t.handle.data for t in inputs]
    rank = arrays[0].ndim
    if axis is None:
        arrays, axis = [a.reshape(-1) for a in arrays], 0
        shape: tuple[int, ...] = (1,) * rank if keep_dims else ()
    else:
        axis = _axis(axis, arrays[0].shape)
        shape = tuple(1 if i == axis else n for i, n in enumerate(arrays[0].shape) if keep_dims or i != axis)
    results = _reduced([np.moveaxis(a, axis, 0) for a in arrays], inputs, combine_fn)
    out = tuple(_tensor(r.reshape(shape), t.dtype) for r, t in zip(results, inputs))
    return out if isinstance(input, tuple) else out[0]


def _reduced(arrays: list[Array], inputs: tuple[Any, ...], combine_fn: Any) -> list[Array]:
    """Halve the first axis until one is left."""
    combine = _combiner(combine_fn, inputs)
    while arrays[0].shape[0] > 1:
        arrays = combine([a[0::2] for a in arrays], [a[1::2] for a in arrays])
    return [a[0] for a in arrays]


def associative_scan(input: Any, axis: Any, combine_fn: Any, reverse: bool = False, **_: Any) -> Any:
    inputs = input if isinstance(input, tuple) else (input,)
    axis, reverse = _axis(_plain(axis), inputs[0].handle.data.shape), _plain(reverse)
    arrays = [np.moveaxis(t.handle.data, axis, 0) for t in inputs]
    if reverse:
        arrays = [a[::-1] for a in arrays]
    combine = _combiner(combine_fn, inputs)
    step = 1
    while step < arrays[0].shape[0]:  # after a step, every element covers twice as many that precede it
        moved = combine([np.roll(a, step, axis=0) for a in arrays], arrays)
        arrays = [np.concatenate([a[:step], m[step:]]) for a, m in zip(arrays, moved)]
        step *= 2
    if reverse:
        arrays = [a[::-1] for a in arrays]
    out = tuple(_tensor(np.moveaxis(a, 0, axis), t.dtype) for a, t in zip(arrays, inputs))
    return out if isinstance(input, tuple) else out[0]


def _combiner(combine_fn: Any, inputs: tuple[Any, ...]) -> Callable[[list[Array], list[Array]], list[Array]]:
    kinds = [t.dtype for t in inputs]
    operation = _operation(combine_fn, inputs)
    if operation is not None:
        return lambda left, right: [operation(left[0], right[0])]

    def combine(left: list[Array], right: list[Array]) -> list[Array]:
        operands = [_tensor(a, kind) for a, kind in zip([*left, *right], [*kinds, *kinds])]
        result = combine_fn(*operands)
        results = result if isinstance(result, tuple) else (result,)
        return [r.handle.data.astype(a.dtype, copy=False) for r, a in zip(results, left)]

    return combine


def _operation(combine_fn: Any, inputs: tuple[Any, ...]) -> Callable[[Array, Array], Array] | None:
    """The NumPy operation that one of Triton's own combinations stands for."""
    import triton.language as tl

    name = getattr(combine_fn, "__name__", "")
    if len(inputs) != 1 or name not in _OPERATIONS or getattr(tl.standard, name) is not combine_fn:
        return None
    data = inputs[0].handle.data
    operation = _OPERATIONS[name][data.dtype.kind not in "iub"]
    if data.dtype == np.bool_ or operation is None:
        return None
    if is_small(data):
        return lambda left, right: operation(widen(left), widen(right)).astype(data.dtype)
    return operation


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _axis(axis: int, shape: tuple[int, ...]) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis {axis} out of bounds for shape {shape}")
    return axis % len(shape)


def _tensor(data: Array, kind: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if not data.shape:
        return tl.core.tensor(TensorHandle(data.reshape(1), kind.scalar), kind.scalar)
    data = np.ascontiguousarray(data)
    return tl.core.tensor(TensorHandle(data, kind.scalar), tl.block_type(kind.scalar, list(data.shape)))
