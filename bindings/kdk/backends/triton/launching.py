"""One launch: arguments and grid as a device takes them, then the programs one after the other."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kdk.errors import SimulationError

from . import interpreter
from .formats import numpy_dtype
from .rewriting import rewritten

# CUDA's limits, x first; HIP's are not lower.
_LARGEST_GRID = (2**31 - 1, 65535, 65535)


def launch(session: interpreter.Session, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> None:
    """Run `kernel[grid](*args, **kwargs)` in NumPy."""
    from triton.language.semantic import TritonSemantic

    from .builder import builder_class
    from .sanitizer import Sanitizer

    if kernel.is_gluon():
        raise SimulationError("KDK-TRITON-GLUON", "only @triton.jit kernels can be interpreted", value=kernel.__name__)
    bound, options = bind(session, kernel, args, kwargs)
    for hook in kernel.pre_run_hooks:
        hook(*args, **kwargs)
    sizes = grid_of(kernel, grid(dict(bound)) if callable(grid) else grid)
    sanitizer = Sanitizer(kernel.__name__, sizes) if session.sanitize else None
    builder = builder_class()(session, options, sanitizer)
    with interpreter.replaced_language(TritonSemantic(builder)), np.errstate(all="ignore"):
        values = {p.name: _to_kernel(p, bound[p.name], p.name, sanitizer) for p in kernel.params}
        if sanitizer is not None:
            sanitizer.begin()
        function = rewritten(kernel, interpreter.active_semantic())
        builder.set_grid_dim(*sizes)
        for x, y, z in np.ndindex(sizes):
            builder.set_grid_idx(x, y, z)
            if sanitizer is not None:
                sanitizer.begin_program((x, y, z))
            _run(function, values, kernel, session, (x, y, z))
        if sanitizer is not None and session.touched is not None:
            session.touched.append(sanitizer.touched())


def inline(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a @triton.jit function from inside a kernel."""
    for name in ("_semantic", "_generator"):
        kwargs.pop(name, None)
    return rewritten(kernel, interpreter.active_semantic())(*args, **kwargs)


def _run(
    function: Callable[..., Any],
    values: dict[str, Any],
    kernel: Any,
    session: interpreter.Session,
    program: tuple[int, ...],
) -> None:
    try:
        function(**values)
    except Exception as error:
        error.add_note(f"in program {program} of {kernel.__name__}, simulated for {session.name}")
        raise


def bind(session: interpreter.Session, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The kernel's arguments by name, and the options of the launch, which the target's back end checks."""
    names = {p.name for p in kernel.params}
    bound = kernel.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in names})
    bound.apply_defaults()
    rest = {k: v for k, v in kwargs.items() if k not in names}
    options = session.backend.parse_options({"debug": bool(kernel.debug), **rest})
    unknown = [name for name in rest if not hasattr(options, name)]
    if unknown:
        raise KeyError(f"Keyword argument {unknown[0]} was specified but unrecognised by {kernel.__name__} and {session.name}")
    return bound.arguments, options


def grid_of(kernel: Any, grid: Any) -> tuple[int, int, int]:
    """The grid of a launch in three dimensions. Raises SimulationError where a device would refuse it."""
    try:
        sizes = tuple(operator.index(size) for size in grid)
    except TypeError:
        sizes = ()
    limits_hold = all(0 <= size <= limit for size, limit in zip(sizes, _LARGEST_GRID))
    if not 1 <= len(sizes) <= 3 or not limits_hold:
        raise SimulationError(
            "KDK-TRITON-GRID",
            f"{kernel.__name__} cannot be launched on this grid",
            value=repr(grid),
            limit=f"one to three integers from 0 to {_LARGEST_GRID}",
        )
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _to_kernel(parameter: Any, value: Any, name: str, sanitizer: Any) -> Any:
    """What the kernel sees of an argument: a constant as it is, a scalar tensor for a number, a pointer for a
    tensor."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle
    from triton.runtime.jit import JITCallable, mangle_type
    from triton.tools.tensor_descriptor import TensorDescriptor

    if parameter.is_constexpr or value is None or isinstance(value, (tl.constexpr, tl.dtype, JITCallable, str)):
        return value
    if isinstance(value, (bool, int, float)):
        kind = tl.str_to_ty(getattr(parameter, "annotation_type", "") or mangle_type(value), None)
        data = np.array([value]).astype(numpy_dtype(kind))
        return tl.tensor(TensorHandle(data, kind), kind)
    if hasattr(value, "data_ptr"):
        return _pointer(value, name, sanitizer)
    if isinstance(value, tuple):
        parts = [_to_kernel(parameter, v, f"{name}[{i}]", sanitizer) for i, v in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, TensorDescriptor):
        return _descriptor(parameter, value, name, sanitizer)
    raise TypeError(f"argument {name}: Triton takes no {type(value).__name__}")


def _pointer(value: Any, name: str, sanitizer: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle
    from triton.runtime.jit import mangle_type

    tensor = getattr(value, "base", value)  # triton.reinterpret() wraps a tensor
    if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
        raise SimulationError(
            "KDK-TRITON-DEVICE",
            f"argument {name} of a simulated kernel lies on another device",
            value=str(tensor.device),
            limit="the simulator takes CPU tensors",
            way_out="move it with .cpu()",
        )
    kind = tl.str_to_ty(mangle_type(value), None)
    handle = TensorHandle(np.array([value.data_ptr()], dtype=np.uint64), kind)
    if sanitizer is not None:
        handle.attr["argument"] = sanitizer.argument(name, tensor, max(1, kind.element_ty.primitive_bitwidth // 8))
    return tl.tensor(handle, kind)


def _descriptor(parameter: Any, value: Any, name: str, sanitizer: Any) -> Any:
    import triton.language as tl

    strides = [_to_kernel(parameter, s, name, sanitizer) for s in value.strides]
    strides[-1] = tl.constexpr(1)
    made = interpreter.active_semantic().semantic.make_tensor_descriptor(
        base=_to_kernel(parameter, value.base, name, sanitizer),
        shape=[_to_kernel(parameter, s, name, sanitizer) for s in value.shape],
        strides=strides,
        block_shape=[tl.constexpr(b) for b in value.block_shape],
        padding_option=value.padding,
    )
    if hasattr(value, "round_f32_to_tf32"):
        made.handle.round_f32_to_tf32 = value.round_f32_to_tf32
    return made
