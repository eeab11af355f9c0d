"""The gradients of an operator: what is kept for backward, and a backward that refuses to be differentiated again.

A kernel at the Autograd key of its own, and not torch.library.register_autograd: before every set-up of a context, that one
reads the schema's arguments anew, which costs more than all the rest for an operator of five (torch 2.13). The three private
names of torch here are the ones that it stands on itself.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _after_autograd_keyset, _any_requires_grad, _AutoDispatchBelowAutograd  # type: ignore[attr-defined]
from torch.autograd import forward_ad

from kdk.dispatch import untraced
from kdk.errors import GradientError
from kdk.op import Op

Keep = Callable[[Any, tuple[Any, ...], Any, str], None]
"""(context, arguments, result, impl): keep in the context what the backward reads."""
Backward = Callable[..., tuple[Tensor | None, ...]]


def differentiate(op: Op, library: torch.library.Library, forward: Any, backward: Any) -> None:
    """Connect the forward with its backward. What no needed gradient reads is not kept."""
    arguments = op.arguments
    inputs, outputs = list(arguments), len(op.outputs)
    parameters = list(inspect.signature(typing.cast(Callable[..., Any], op.backward)).parameters)
    reads = parameters[outputs:-1]  # between the gradients and `needs`
    pool = [*inputs, *op.outputs, *op.saved]  # where a name lies in arguments and results
    scalars = [pool.index(name) for name in reads if name in arguments and name not in op.tensors]
    tensors = [name for name in reads if pool.index(name) not in scalars]
    order = [tensors.index(name) if name in tensors else scalars.index(pool.index(name)) - len(scalars) for name in reads]
    defaults = [p.default for p in arguments.values()]

    @functools.cache
    def plan(flags: tuple[bool, ...]) -> tuple[list[int], str, list[int | None]]:
        """For these needed gradients: where the kept tensors lie in the pool (-1: not kept), the names, each input's place."""
        needs = [name for name, needed in zip(inputs, flags) if needed]
        for name in needs:
            if name not in op.uses:
                raise no_gradient(op.name, f"{op.name} has no gradient for {name!r}")
        keep = {read for name in needs for read in op.uses[name]}
        where = [pool.index(name) if name in keep else -1 for name in tensors]
        return where, ",".join(needs), [list(op.uses).index(name) if name in needs else None for name in inputs]

    def keep(ctx: Any, args: tuple[Any, ...], result: Any, impl: str) -> None:
        if len(args) < len(defaults):  # the dispatcher drops arguments that equal their default
            args = (*args, *defaults[len(args) :])
        results = result if isinstance(result, tuple) else (result,)
        where, ctx.needs, ctx.places = plan(ctx.needs_input_grad[2:])  # the keyset and `impl` go before
        have = (*args, *results)
        if where:
            ctx.save_for_backward(*[have[i] if i >= 0 else None for i in where])
        ctx.scalars = [have[i] for i in scalars]
        ctx.impl = impl
        ctx.set_materialize_grads(False)
        if len(results) > outputs:
            ctx.mark_non_differentiable(*results[outputs:])

    def run_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = grads[:outputs]
        missing = sum([g is None for g in given])
        if missing == outputs:
            return (None,) * len(ctx.places)
        read = ctx.saved_tensors
        if scalars:
            read = (*read, *ctx.scalars)
            read = [read[i] for i in order]
        result = backward(*given, *read, ctx.needs, impl=ctx.impl)
        if isinstance(result, Tensor):
            result = (result,)
        # An output that nothing flowed back to may leave an input without a gradient: its place is (0,)-shaped.
        return tuple([None if p is None or (missing and result[p].shape == (0,)) else result[p] for p in ctx.places])

    _implement(library, forward, keep, run_backward)


def refuse_to_differentiate(op: Op, library: torch.library.Library, torch_op: Any, problem: str) -> None:
    """Without a formula torch would differentiate the op's Python body, silently. Raises only when really differentiated."""

    def keep(ctx: Any, args: tuple[Any, ...], result: Any, impl: str) -> None: ...

    def refuse(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise no_gradient(op.name, problem)

    _implement(library, torch_op, keep, refuse)


class _Refused(torch.autograd.Function):
    """The identity, for a transform of torch.func. Raises when it is really differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, t: Tensor) -> Tensor:
        return t.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[str, Tensor], output: Tensor) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise no_gradient(ctx.name, f"{ctx.name} has no backward")


def without_gradient(op: Op, result: Any) -> Any:
    """A reference's results, of an operator without a backward, inside a transform of torch.func: torch would differentiate it."""
    single = isinstance(result, Tensor)
    found = [_Refused.apply(op.name, t) if t.is_floating_point() else t for t in ((result,) if single else result)]
    return found[0] if single else tuple(found)


def no_gradient(name: str, problem: str) -> GradientError:
    """The error for a derivative that an operator does not have."""
    way_out = f"with kdk.use({name}='reference') around the forward: plain torch, differentiable to any order"
    return GradientError("KDK-GRADIENT", problem, way_out=way_out)


def _implement(library: torch.library.Library, torch_op: Any, keep: Keep, run_backward: Backward) -> None:
    """The op's kernel at the Autograd key."""

    class Function(torch.autograd.Function):
        @staticmethod
        @untraced
        def forward(ctx: Any, keyset: Any, impl: str, *args: Any) -> Any:
            with _AutoDispatchBelowAutograd():
                result = torch_op.redispatch(keyset & _after_autograd_keyset, *args, impl=impl)
                keep(ctx, args, result, impl)
                return result

        @staticmethod
        @untraced
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return None, None, *run_backward(ctx, *grads)

    Function.__name__ = Function.__qualname__ = f"{torch_op._opname}_backward"

    @untraced
    def kernel(keyset: Any, *args: Any, impl: str = "") -> Any:
        # Of a forward-mode gradient torch's Function says that there is none; past it, tangents would be dropped in silence.
        if (torch.is_grad_enabled() and _any_requires_grad(*args)) or forward_ad._current_level >= 0:
            return Function.apply(keyset, impl, *args)
        with _AutoDispatchBelowAutograd():
            return torch_op.redispatch(keyset & _after_autograd_keyset, *args, impl=impl)

    library.impl(torch_op._opname, kernel, "Autograd", with_keyset=True)
