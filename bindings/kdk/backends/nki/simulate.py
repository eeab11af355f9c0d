"""NKI kernels on CPU tensors: in the vendor's simulator where its package is installed, else in kdk's emulator."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kdk.backends.nki import emulator
from kdk.backends.nki.launch import LOCAL


def _run(target: str) -> Callable[..., Any]:
    if not emulator.vendor_nki_available():
        return lambda kernel, *args: emulator.simulate(kernel, target=target)(*args)
    import nki

    def run(kernel: Callable[..., Any], *args: Any) -> Any:
        os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = target  # the vendor's simulator takes its target from here alone
        return nki.simulate(kernel)(*args)

    return run


def run_simulated(function: Callable[..., Any], args: tuple[Any, ...], target: str) -> Any:
    """`function` with every NKI kernel inside it simulated for `target`."""
    old, LOCAL.runner = LOCAL.runner, _run(target)
    try:
        return function(*[a.detach() if isinstance(a, Tensor) else a for a in args])
    finally:
        LOCAL.runner = old
