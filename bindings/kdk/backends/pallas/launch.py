"""Pallas kernels on a TPU."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from kdk.backends.pallas.environment import prepare_jax


@functools.cache
def missing(where: str) -> str | None:
    """Why Pallas kernels cannot be used on a platform ("cpu": in the simulator)."""
    if importlib.util.find_spec("jax") is None:
        return "jax is not installed: pip install 'torch-kdk[jax]'"
    if where != "cpu":
        return f"this version of kdk does not launch Pallas kernels on {where}"
    return None


def prepare() -> None:
    """Before a kernel's file imports jax: keep jax off a TPU that is not there."""
    prepare_jax()


def target(device: torch.device) -> str:
    """Not reached: `missing` refuses every device."""
    raise AssertionError(device)


def run_on_device(function: Callable[..., Any], args: tuple[Any, ...]) -> NoReturn:
    """Not reached: `missing` refuses every device."""
    raise AssertionError("no launcher")
