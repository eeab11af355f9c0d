"""NKI kernels on Trainium, and `run`, through which a kernel's file calls its kernels everywhere."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch


class _Local(threading.local):
    def __init__(self) -> None:
        self.runner: Callable[..., Any] | None = None


LOCAL = _Local()  # set by simulate.run_simulated for the calls inside it


def missing(where: str) -> str | None:
    """Why NKI kernels cannot be used on a platform ("cpu": in a simulator)."""
    if where != "cpu":
        return f"this version of kdk does not launch NKI kernels on {where}"
    if importlib.util.find_spec("ml_dtypes") is None:
        return "kdk's emulator of NKI needs ml_dtypes, which is not installed: pip install 'torch-kdk[neuron]'"
    return None


def prepare() -> None:
    """Make `import nki` work for a kernel's file: the vendor's package, or kdk's emulator in its place."""
    from kdk.backends.nki import emulator

    if not emulator.vendor_nki_available():
        emulator.install()


def target(device: torch.device) -> str:
    """Not reached: `missing` refuses every device."""
    raise AssertionError(device)


def run(kernel: Callable[..., Any], *args: Any) -> Any:
    """Call an `@nki.jit` kernel: simulated on CPU tensors, launched as it is elsewhere."""
    if LOCAL.runner is not None:
        return LOCAL.runner(kernel, *args)
    return kernel(*args)


def run_on_device(function: Callable[..., Any], args: tuple[Any, ...]) -> NoReturn:
    """Not reached: `missing` refuses every device."""
    raise AssertionError("no launcher")
