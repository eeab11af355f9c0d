"""How an operator reaches torch: one declaration -> schema, fake, autograd, choice, counters.

    front door (Python)    reads the choice once, makes it a string argument of the op; inlines the reference where asked to
      kdk::op(..., *, impl="") -> (outputs..., saved...)     the only public op; `impl` is a constant in every graph
          Autocast*                     autocast.shut_out: nothing below is cast
          autograd.differentiate        keeps what the needed gradients read, and `impl`
            kdk::op_backward(grads..., inputs?, saved?, needs, *, impl="") -> one per differentiable input, empty where not needed
          fake                          the reference (or `Op.fake`) on fake tensors, in the promised memory format
          CompositeExplicitAutograd     dispatch.body: every device, every tensor that is real
          FunctionalTensorMode          capture.open_in_graphs: the body in the graph, for compilers that know no kdk operator
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

from kdk.autocast import shut_out, without_autocast
from kdk.autograd import differentiate, refuse_to_differentiate, without_gradient
from kdk.capture import open_in_graphs
from kdk.checking import checking, no_tensor
from kdk.decomposing import BY_KIND, decomposing
from kdk.dispatch import as_promised, body, no_nones
from kdk.errors import KdkError, RefusedError
from kdk.op import Op
from kdk.recording import inlined
from kdk.selection import current
from kdk.sharding import follow

NAMESPACE = "kdk"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


class Operator:
    """A registered operator. `call` takes the reference's arguments; `forward` and `backward` are the torch ops behind it.

    `public` is what users call: `call`, or what `Op.public` makes of it.
    """

    def __init__(self, op: Op) -> None:
        self.op = op
        self.forward: Any = None
        self.backward: Any = None
        self.call: Callable[..., Any] = op.reference
        self.public = self.call


def register(op: Op) -> Operator:
    """Define, implement and connect the torch ops of a declaration."""
    operator = Operator(op)
    operator.forward = _define(op, "forward")
    if op.backward is None:
        refuse_to_differentiate(op, LIBRARY, operator.forward, f"{op.name} has no backward")
    else:
        operator.backward = _define(op, "backward")
        differentiate(op, LIBRARY, operator.forward, operator.backward)
        refuse_to_differentiate(op, LIBRARY, operator.backward, f"the backward of {op.name} cannot be differentiated again")
    operator.call = _front_door(op, operator.forward)
    operator.public = _public(op, operator.call)
    follow(op, operator.forward, operator.backward)
    return operator


def _define(op: Op, direction: str) -> Any:
    function, described = op.function(direction), op.described(direction)
    assert function is not None and described is not None
    name = op.name if direction == "forward" else f"{op.name}_backward"
    schema = torch.library.infer_schema(resolved(function), mutates_args=()).replace(")", ', *, str impl="")', 1)
    LIBRARY.define(f"{name}{schema}", tags=TAGS)
    LIBRARY.impl(name, body(op, direction), "CompositeExplicitAutograd")
    same, check = as_promised(op, described), checking(op) if direction == "forward" else None

    def fake(*args: Any, impl: str = "") -> Any:
        if check is not None:
            check(*args)
        return no_nones(same(*args), args)

    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    torch_op = getattr(getattr(torch.ops, NAMESPACE), name).default
    shut_out(LIBRARY, torch_op)
    open_in_graphs(LIBRARY, torch_op, body(op, direction, captured=True))
    return torch_op


def resolved(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function's signature with real types for annotations, which infer_schema wants.

    A gradient that may be None is a Tensor in the schema, an empty one (`no_nones`): infer_schema knows no other result.
    """
    hints = typing.get_type_hints(function)
    signature = inspect.signature(function)
    if typing.get_origin(hints["return"]) is tuple:
        hints["return"] = tuple[(Tensor,) * len(typing.get_args(hints["return"]))]  # type: ignore[misc]
    elif hints["return"] == (Tensor | None):
        hints["return"] = Tensor
    parameters = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values()]

    def same(*args: Any) -> None: ...

    same.__signature__ = signature.replace(parameters=parameters, return_annotation=hints["return"])  # type: ignore[attr-defined]
    same.__annotations__ = hints
    return same


def _check_traced(check: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Of an exception that leaves a graph, dynamo shows the type and the positional arguments: make the text one.

    Without fullgraph=True the code runs again, untraced, and raises the error itself.
    """
    try:
        check(*args, **kwargs)
    except KdkError as error:
        raise ValueError(error.text) from None


def wants_gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Traced by dynamo."""
    if torch.is_grad_enabled():
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.requires_grad:
                return True
    return False


def _front_door(op: Op, forward: Any) -> Callable[..., Any]:
    """The public function: traced by dynamo, so that the choice it reads is guarded and becomes a constant of the graph."""
    name, outputs, saved = op.name, len(op.outputs), len(op.saved)
    check, reference, decomposes = checking(op), op.reference, decomposing(op)
    arguments = list(op.arguments)
    fixed = tuple((arguments.index(t), t) for t in op.tensors if op.uses and t not in (*op.uses, *op.indexes))

    def trim(result: Any) -> Any:
        return result[0] if outputs == 1 else result[:outputs]

    def not_differentiable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The argument that needs a gradient which the backward does not have."""
        for i, argument in fixed:
            value = args[i] if i < len(args) else kwargs.get(argument)
            if isinstance(value, Tensor) and value.requires_grad:
                return argument
        return ""

    def call(*args: Any, **kwargs: Any) -> Any:
        impl = current(name)
        reason, transformed = "", False
        if is_compiling():  # a constant under dynamo; true in non-strict export too
            if impl.startswith("reference"):
                reason = BY_KIND
            elif impl in ("", "!") and (op.uses or not wants_gradient(args, kwargs)):  # else the op stays, which refuses
                reason = decomposes(args, kwargs)
        elif impl and impl.startswith("reference"):
            reason = "use"
        elif maybe_current_level() is not None or forward_ad._current_level >= 0:  # vmap, grad, jvp; dual numbers
            transformed = True
            reason = "torch.func transform" if forward_ad._current_level < 0 else "forward-mode gradient"
            if impl.endswith("!") and impl != "!":
                raise RefusedError("KDK-REFUSED", f"{name}: a {reason} has no kernel, only the reference", value=impl)
        if fixed and not reason and torch.is_grad_enabled():
            argument = not_differentiable(args, kwargs)
            if argument:
                reason = f"gradient of {argument}"
                if impl.endswith("!"):
                    raise RefusedError("KDK-REFUSED", f"{name} has no kernel for the gradient of its argument {argument!r}")
        if not reason:
            result = forward(*args, impl=impl, **kwargs) if impl else forward(*args, **kwargs)
            return trim(result) if saved else result
        inlined(name, reason)
        if is_dynamo_compiling():
            _check_traced(check, args, kwargs)
        else:
            check(*args, **kwargs)
        with without_autocast(args, kwargs):
            result = reference(*args, **kwargs)
        if transformed and not op.uses:
            result = without_gradient(op, result)
        return trim(result) if saved else result

    functools.update_wrapper(call, op.reference)
    call.__module__ = "kdk.ops"  # where pickle finds it again
    signature = inspect.signature(op.reference)
    returned = "Tensor" if outputs == 1 else f"tuple[{', '.join(['Tensor'] * outputs)}]"
    call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return call


def _public(op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
    """`Op.public` with the operator as its first argument; traced by dynamo like the operator's own front door."""
    public = op.public
    if public is None:
        return call

    needed = [(i, name) for i, (name, p) in enumerate(op.signature.parameters.items()) if p.annotation is Tensor]

    def function(*args: Any, **kwargs: Any) -> Any:
        for i, name in needed:  # `public` reads their shapes before the operator's own checks
            if i < len(args) or name in kwargs:
                value = args[i] if i < len(args) else kwargs[name]
                if not isinstance(value, Tensor):
                    raise no_tensor(op, name, value)
        return public(call, *args, **kwargs)

    functools.update_wrapper(function, public)
    function.__name__ = function.__qualname__ = op.name
    function.__module__ = "kdk.ops"
    function.__signature__ = op.signature  # type: ignore[attr-defined]
    return function
