"""NKI kernels on CPU tensors: in the vendor's simulator where its package is installed, else in kdk's emulator."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from kdk.backends.nki import emulator
from kdk.backends.nki.launch import LOCAL, OVERRIDE

_ENVIRONMENT = threading.RLock()


@contextlib.contextmanager
def _vendor_target(target: str) -> Iterator[None]:
    """The vendor's simulator takes its target from the environment alone, which is the process's: one simulation at a time.

    A kernel that another thread compiles for a device meanwhile sees this target too.
    """
    with _ENVIRONMENT:
        before = os.environ.get(OVERRIDE)
        os.environ[OVERRIDE] = target
        try:
            yield
        finally:
            if before is None:
                del os.environ[OVERRIDE]
            else:
                os.environ[OVERRIDE] = before


def _runner(target: str) -> Callable[..., Any]:
    if not emulator.vendor_nki_available():
        return lambda kernel, *args: emulator.simulate(kernel, target=target)(*args)
    import nki

    def run(kernel: Callable[..., Any], *args: Any) -> Any:
        with _vendor_target(target):
            return nki.simulate(kernel)(*args)

    return run


def run_simulated(function: Callable[..., Any], args: tuple[Any, ...], target: str) -> Any:
    """`function` with every NKI kernel inside it simulated for `target`."""
    old, LOCAL.runner = LOCAL.runner, _runner(target)
    try:
        return function(*[a.detach() if isinstance(a, Tensor) else a for a in args])
    finally:
        LOCAL.runner = old
