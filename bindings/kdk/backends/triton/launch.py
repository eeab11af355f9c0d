"""Triton kernels on a GPU: the function is called as it is, on the tensors' device."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@functools.cache
def missing(where: str) -> str | None:
    """Why Triton kernels cannot be used on a platform ("cpu": in the simulator, which computes with ml_dtypes and scipy)."""
    for package in ("triton", "ml_dtypes", "scipy") if where == "cpu" else ("triton",):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: pip install 'torch-kdk[triton]'"
    return None


def prepare() -> None:
    """Nothing has to be done before a kernel's file is imported."""


@functools.cache
def target(device: torch.device) -> str:
    """The chip of a device, as `--target` names it: sm_90, gfx942."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def run_on_device(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a kernel's host function with the tensors' device current."""
    device = next(a.device for a in args if isinstance(a, Tensor))
    if device.index == torch.cuda.current_device():
        return function(*args)
    with torch.cuda.device(device):
        return function(*args)
