"""The operators for JAX: `import kdk.jax`, then `kdk.jax.rms_norm(x, weight, 1e-6)`, with the arguments of `kdk.ops.rms_norm`.

The same Pallas kernels, forward and backward, under jax.jit, jax.grad and jax.vmap: compiled on a TPU, interpreted on a CPU.
Scalars are static. Nothing falls back: what the kernels do not take raises. Built from the operators' declarations, whose
semantics are written in torch: importing this imports torch too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kdk import registry, tuning
from kdk.backends.pallas import KINDS, LANGUAGE
from kdk.backends.pallas.environment import prepare_libtpu
from kdk.backends.pallas.launch import missing
from kdk.checking import checking
from kdk.dispatch import kernel_file, load_kernel
from kdk.errors import FallbackWarning, GradientError, InputError, RefusedError
from kdk.op import Op

if missing("cpu"):
    raise ImportError(missing("cpu"))
prepare_libtpu()
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

importlib.import_module("kdk.ops")  # registers the providers' operators


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("_"):
        raise AttributeError(name)
    operator = registry.OPERATORS.get(name)
    if operator is None or kernel_file(operator.op, "pallas", "forward") is None:
        problem = "has no operator" if operator is None else "has no Pallas kernel for"
        raise AttributeError(f"module 'kdk.jax' {problem} {name!r}; there are {', '.join(__dir__())}", name=name, obj=None)
    return _function(name)


def __dir__() -> list[str]:
    return sorted(name for name, operator in registry.OPERATORS.items() if kernel_file(operator.op, "pallas", "forward"))


@jax.tree_util.register_static
class _Needs(tuple[str, ...]):
    """Names of the inputs that need a gradient; no array, so that it stays known while jax traces."""


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    """The operator as a differentiable JAX function."""
    op = registry.OPERATORS[name].op
    names, outputs = list(op.arguments), len(op.outputs)
    static = tuple(i for i, name in enumerate(names) if name not in op.tensors)
    signature = inspect.signature(op.reference)

    def trim(results: tuple[Any, ...]) -> Any:
        return results[0] if outputs == 1 else results[:outputs]

    @functools.partial(jax.custom_vjp, nondiff_argnums=static)
    def differentiable(*args: Any) -> Any:
        return trim(_run(op, "forward", args))

    def forward(*args: Any) -> tuple[Any, Any]:
        """args: tensors come with whether they are perturbed, that is, need a gradient."""
        needs = _Needs(n for n, a in zip(names, args) if n in op.tensors and a is not None and a.perturbed)
        _check_differentiable(op, needs)
        values = [a.value if n in op.tensors and a is not None else a for n, a in zip(names, args)]
        results = _run(op, "forward", tuple(values))
        keep = {read for name in needs for read in op.uses[name]}
        have = {**dict(zip(names, values)), **dict(zip((*op.outputs, *op.saved), results))}
        return trim(results), (needs, {name: have[name] for name in keep})

    def backward(*args: Any) -> tuple[Any, ...]:
        scalars = dict(zip([names[i] for i in static], args))
        (needs, kept), cotangents = args[len(static) :]
        return _gradients(op, needs, {**kept, **scalars}, cotangents if outputs > 1 else (cotangents,))

    differentiable.defvjp(forward, backward, symbolic_zeros=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        _check(op, bound.args)
        return differentiable(*bound.args)

    functools.update_wrapper(call, op.reference)
    call.__module__ = __name__
    arrays = [p.replace(annotation=jax.Array) if p.name in op.tensors else p for p in signature.parameters.values()]
    returned = "Array" if outputs == 1 else f"tuple[{', '.join(['Array'] * outputs)}]"
    call.__signature__ = signature.replace(parameters=arrays, return_annotation=returned)  # type: ignore[attr-defined]
    return call


def _gradients(op: Op, needs: _Needs, have: dict[str, Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
    """A gradient for every tensor argument, None where it needs none or got nothing."""
    zero = jax.custom_derivatives.SymbolicZero
    grads = [None if isinstance(c, zero) else c for c in cotangents]
    if all(g is None for g in grads):
        return (None,) * len(op.tensors)
    reads = list(inspect.signature(op.backward).parameters)[len(op.outputs) : -1]  # type: ignore[arg-type]
    results = _run(op, "backward", (*grads, *(have.get(name) for name in reads), ",".join(needs)))
    found = dict(zip(op.uses, results))
    return tuple([found.get(name) for name in op.tensors])


def _check_differentiable(op: Op, needs: _Needs) -> None:
    for name in needs:
        if name not in op.uses:
            way_out = "jax.lax.stop_gradient around it"
            raise GradientError("KDK-GRADIENT", f"{op.name} has no gradient for {name!r}", way_out=way_out)
    if needs and kernel_file(op, "pallas", "backward") is None:
        raise GradientError("KDK-GRADIENT", f"{op.name} has no Pallas kernel for its backward")


# ---- arguments --------------------------------------------------------------------------------------------------------


def _described(args: Sequence[Any]) -> list[Any]:
    """The arguments as torch sees them: arrays become tensors without data."""
    return [
        torch.empty(a.shape, dtype=getattr(torch, a.dtype.name), device="meta") if hasattr(a, "dtype") else a for a in args
    ]


def _check(op: Op, args: tuple[Any, ...]) -> None:
    """Raise InputError for what the operator, or the language of its kernels, does not take."""
    for name, a in zip(op.arguments, args):
        if name in op.tensors and a is not None:
            if not isinstance(a, jax.Array):
                raise InputError("KDK-JAX-ARGUMENT", f"kdk.jax.{op.name}: {name}", value=type(a).__name__, limit="a jax.Array")
            if a.dtype.name not in LANGUAGE.dtypes:
                limit = LANGUAGE.no_dtype.get(a.dtype.name, f"Pallas kernels take {', '.join(sorted(LANGUAGE.dtypes))}")
                raise InputError("KDK-JAX-DTYPE", f"kdk.jax.{op.name}: {name}", value=a.dtype.name, limit=limit)
        elif isinstance(a, jax.Array):
            way_out = "a Python number; in jax.jit name it in static_argnames"
            raise InputError("KDK-JAX-STATIC", f"kdk.jax.{op.name}: {name} is static", value=type(a).__name__, way_out=way_out)
    checking(op)(*_described(args))


def _misconfigured(reason: str) -> None:
    warnings.warn(f"recorded launch parameters are not taken, the kernel chooses by itself: {reason}", FallbackWarning, stacklevel=2)


def _target() -> str:
    """The chip that kernels run on, or the one that is simulated."""
    if jax.default_backend() != "tpu":
        return LANGUAGE.targets[0]
    kind = jax.devices()[0].device_kind
    return {name: chip for chip, name in KINDS.items()}.get(kind, kind)


# ---- kernels ----------------------------------------------------------------------------------------------------------


def _run(op: Op, direction: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All results of a direction's kernel."""
    described = _described(args)
    if any(isinstance(t, torch.Tensor) and t.numel() == 0 for t in described):
        return _empty(op, direction, described)
    kernel = load_kernel(op, "pallas", direction)
    assert kernel is not None, "asked for before"
    target = _target()
    reason = kernel.supports(target, *kernel.arguments(*described)) if kernel.supports else None
    if reason:
        raise RefusedError("KDK-REFUSED", f"kdk.jax.{op.name}: its Pallas kernel ({direction}) does not take this", value=reason)
    parameters = tuning.launch_parameters(op, direction, target, kernel, _misconfigured)(described)
    args = kernel.arguments(*args)
    static = tuple(i for i, a in enumerate(args) if a is not None and not hasattr(a, "dtype"))
    results = _jitted(kernel.configured(parameters), static)(*args)
    return tuple(results) if isinstance(results, tuple | list) else (results,)


@functools.cache
def _jitted(kernel: Callable[..., Any], static: tuple[int, ...]) -> Callable[..., Any]:
    """A kernel compiled for a TPU and interpreted for a CPU, whichever the program is lowered for."""

    def run(*args: Any) -> Any:
        arrays = [None if i in static else a for i, a in enumerate(args)]

        def on(interpret: bool) -> Callable[..., Any]:
            def branch(*given: Any) -> Any:
                return kernel(*[args[i] if i in static else a for i, a in enumerate(given)], interpret=interpret)

            return branch

        return jax.lax.platform_dependent(*arrays, cpu=on(True), tpu=on(False))

    return jax.jit(run, static_argnums=static)


def _empty(op: Op, direction: str, described: Sequence[Any]) -> tuple[Any, ...]:
    """Nothing to launch: results without elements, and the gradient of a tensor that met no element is zero."""
    function = op.function(direction)
    assert function is not None
    results = function(*described)
    results = results if isinstance(results, tuple) else (results,)
    if direction == "forward" and any(t.numel() for t in results):
        problem = f"kdk.jax.{op.name}: an empty array whose result is not empty"
        raise RefusedError("KDK-REFUSED", problem, value=[tuple(t.shape) for t in results], limit="its kernel takes none")
    dtypes = [None if t is None else str(t.dtype).removeprefix("torch.") for t in results]
    return tuple([None if t is None else jnp.zeros(tuple(t.shape), d) for t, d in zip(results, dtypes)])
