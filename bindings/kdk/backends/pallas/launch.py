"""Pallas kernels on a TPU, as operators of TorchTPU (`torch.tpu.pallas.jax_op`). On tensors of PyTorch/XLA: torch_xla.py."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch

from kdk.backends.pallas import torch_xla
from kdk.backends.pallas.environment import on_chip, prepare_jax

NAMESPACE = "kdk_pallas"
CHIPS = {"TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v6e": "v6e", "TPU v7": "tpu7x"}  # by the names that TorchTPU gives


@functools.cache
def missing(where: str) -> str | None:
    """Why Pallas kernels cannot be used on a platform ("cpu": in the simulator)."""
    if importlib.util.find_spec("jax") is None:
        return "jax is not installed: pip install 'torch-kdk[jax]'"
    if where == "cpu":
        return None
    if where in torch_xla.PLATFORMS:
        return torch_xla.missing()
    if importlib.util.find_spec("torch_tpu") is None:
        return "torch_tpu, through which kdk launches Pallas kernels, is not installed: pip install torch_tpu"
    if torch.accelerator.device_count() == 0:
        return "TorchTPU finds no TPU on this host"
    return None


def prepare() -> None:
    """Before a kernel's file imports jax: keep jax off a TPU that is not there."""
    prepare_jax()


@functools.cache
def target(device: torch.device) -> str:
    """The chip of a device, as `--target` names it: v6e. A chip that kdk does not know keeps TorchTPU's name."""
    if device.type == "xla":
        return torch_xla.target()
    name = torch.tpu.get_device_name()  # type: ignore[attr-defined]  # torch_tpu brings torch.tpu
    return CHIPS.get(name, name)


@functools.cache
def operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel's function as an operator of TorchTPU, which traces it once for every set of shapes and scalars."""
    from torch.tpu.pallas import jax_op  # type: ignore[import-not-found]

    signature = inspect.signature(function, eval_str=True)
    taken = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]

    def kernel(*args: Any) -> Any:
        with on_chip(target(torch.device("tpu"))):  # jax itself sees the CPU: TorchTPU holds the TPU
            return function(*args)

    # jax_op makes the operator's schema of annotations and takes every one that is no jax.Array for a static argument.
    kernel.__signature__ = signature.replace(parameters=taken)  # type: ignore[attr-defined]
    name = f"{function.__module__}_{function.__name__}".replace(".", "_")
    return jax_op(f"{NAMESPACE}::{name}", kernel)


def run_on_device(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`function` on tensors of a TPU, compiled by TorchTPU or PyTorch/XLA."""
    if torch_xla.is_xla(args):
        return torch_xla.run(function, args)
    return operator(function)(*args)
