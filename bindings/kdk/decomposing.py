"""Under torch.compile: whether an operator becomes its reference, which the compiler fuses, or keeps its kernel.

What is recorded of the chip and the bucket decides (`block` in kdk.tuning): the winner in the block in which the kernel does worst.
Without a record the kind does: element-wise and row operators decompose, algorithmic ones keep their kernel. A patched module whose
operators all decompose runs its own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kdk import tuning
from kdk.backends import LANGUAGES
from kdk.op import Op
from kdk.platforms import platform
from kdk.registry import OPERATORS
from kdk.selection import current

BY_KIND = "compile"
OWN_FORWARD = "compile: the module's own forward"
Rule = tuple[tuple[tuple[str, int, int], ...], str, str]
"""Letters with their sizes (more than, at most); who wins; the record in words."""


def chip(device_type: str, index: int | None) -> str:
    """The chip on which tensors of a device meet kernels of its own language; "" where they meet none."""
    where = platform(device_type)
    for language in LANGUAGES.values():
        if where in language.platforms:
            launch = language.module("launch")
            device = torch.device(device_type) if index is None else torch.device(device_type, index)
            return "" if launch.missing(where) else str(launch.target(device))
    return ""


def _rules(name: str, direction: str, dtype: str, device_type: str, index: int | None) -> tuple[Rule, ...]:
    """What is recorded of an operator's blocks on a device."""
    target, found = chip(device_type, index), []
    if target:
        for (of, working, sizes), entry in tuning.table(OPERATORS[name].op, target).entries.items():
            part = entry.get("block")
            if part and (of, working) == (direction, dtype):
                text = f"{BY_KIND}: in {part['block']} on {target} the block takes {part['ratio']:.2f} of its time with the kernel"
                limits = tuple([(letter, size // 2, size) for letter, size in sizes])
                found.append((limits, part["winner"], f"{text}, {part['evidence']}"))
    return tuple(found)


# Read while tracing, and no part of the graph; see inlined in recording.py.
_rules._dynamo_marked_constant = True  # type: ignore[attr-defined]


def own_forward(operators: Sequence[str], tensor: Tensor | None) -> str:
    """Of a patched module: the reason why it runs its own forward, as if it were not patched; "": it calls the operators.

    So it does where all of them would become their reference at any size: then the module loses nothing to another spelling of
    the same formula. Where a kernel is recorded to win, or was asked for, the operators' front doors decide by size. Traced by dynamo.
    """
    if tensor is None:
        return ""
    direction = "backward" if torch.is_grad_enabled() else "forward"
    for name in operators:
        if current(name) not in ("", "!"):
            return ""
        decomposes = OPERATORS[name].op.kind != "algorithmic"
        for limits, winner, _ in _rules(name, direction, str(tensor.dtype).removeprefix("torch."), tensor.device.type, tensor.device.index):
            if winner == tuning.KERNEL:
                return ""
            decomposes = decomposes or not limits
        if not decomposes:
            return ""
    return OWN_FORWARD


def decomposing(op: Op) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
    """The function from a call's arguments to the reason why it becomes its reference, "": it does not. Traced by dynamo.

    A size that a graph leaves open is in no bucket, and gets no guard.
    """
    name, by_kind = op.name, BY_KIND if op.kind != "algorithmic" else ""
    arguments, places = list(op.arguments), tuning.places(op, "forward")
    first = next(i for i, argument in enumerate(arguments) if argument in op.tensors and argument not in op.indexes)
    differentiable = [i for i, argument in enumerate(arguments) if argument in op.uses]

    def reason(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        given = [*args, *[kwargs.get(argument) for argument in arguments[len(args) :]]]
        x = given[first]
        if not isinstance(x, Tensor):
            return by_kind
        direction = "forward"
        if torch.is_grad_enabled():
            for i in differentiable:
                if isinstance(given[i], Tensor) and given[i].requires_grad:
                    direction = "backward"
        rules = _rules(name, direction, str(x.dtype).removeprefix("torch."), x.device.type, x.device.index)
        if not rules:
            return by_kind
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        sizes = tuning.sizes_of(places, given)
        for limits, winner, text in rules:
            inside = True
            for letter, low, high in limits:
                size = sizes.get(letter)
                if size is None or not (statically_known_true(size > low) and statically_known_true(size <= high)):
                    inside = False
            if inside:
                return text if winner == tuning.REFERENCE else ""
        return by_kind

    return reason
