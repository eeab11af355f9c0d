"""A stand-in for the vendor's nki package, for tests.

jit, simulate and the modules exist as documented; kdk's emulator executes what they are given. A kernel that is called
with "neuron" tensors runs, with tensors of torch's fake mode it tells the shapes of its results, and with CPU tensors
it refuses. Every call is recorded. It shows how kdk uses the package, and nothing about the vendor's own.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from kdk.backends.nki import emulator
from kdk.backends.nki.emulator import isa, language

sys.modules["nki.isa"], sys.modules["nki.language"] = isa, language


class Call(NamedTuple):
    """how: simulate, device, shapes. target: NEURON_PLATFORM_TARGET_OVERRIDE during the call."""

    how: str
    kernel: str
    arguments: tuple[Any, ...]
    target: str | None


CALLS: list[Call] = []


def _record(how: str, kernel: Kernel, arguments: tuple[Any, ...]) -> None:
    CALLS.append(Call(how, kernel.__name__, arguments, os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE")))


class Kernel:
    """What jit makes of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        from torch_neuronx import device

        if any(device.is_fake(a) for a in args):
            _record("shapes", self, args)
            return device.shapes(emulator.simulate(self.function, data=False), args)
        _record("device", self, args)
        return device.launch(emulator.simulate(self.function), args)


def jit(function: Callable[..., Any] | None = None, **configuration: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def simulate(kernel: Kernel) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        _record("simulate", kernel, args)
        return emulator.simulate(kernel.function)(*args)

    return run
