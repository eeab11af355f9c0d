"""A stand-in for TorchNeuron's torch_neuronx, for tests: the device "neuron" and `nki_op`, as far as they are documented."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import nki  # noqa: F401  (the vendor's package needs it to be imported, too)
import torch

from . import device

device.register()
INSIDE: set[tuple[str, bool]] = set()  # the aten operators inside nki_op's operators, and whether they read floating point


def nki_op(name: str, *, mutates_args: Iterable[str]) -> Callable[[Callable[..., Any]], Any]:
    """A torch custom operator of a function that calls NKI kernels.

    The schema comes from the annotations, the function itself is the fake implementation, and what it writes without
    naming it in `mutates_args` is an error.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        def run(*args: Any) -> Any:
            before, outside = [device.copy_of(a) for a in args], len(device.OPERATORS)
            result = function(*args)
            INSIDE.update(device.OPERATORS[outside:])
            for parameter, argument, copy in zip(operator._opoverload._schema.arguments, args, before):
                if parameter.name not in mutates_args and not device.same(argument, copy):
                    raise RuntimeError(f"{name} writes {parameter.name!r}, which mutates_args does not name")
            return result

        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        operator = torch.library.custom_op(name, run, mutates_args=mutates_args, schema=schema)
        operator.register_fake(function)
        return operator

    return decorate
