"""Pallas kernels on tensors of PyTorch/XLA, by `torch_xla.core.xla_builder.call_jax`, which needs jax and torchax.

On its platform xla:tpu a kernel is compiled for the TPU. On xla:cpu it is interpreted: jax's interpreter becomes part of the program
that XLA compiles for the CPU.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kdk.backends.pallas.environment import on_chip

PLATFORMS = ("xla:tpu", "xla:cpu")
CHIPS = {"v5litepod": "v5e", "v7x": "tpu7x"}  # what a TPU virtual machine calls them -> kdk's names, where these differ


@functools.cache
def missing() -> str | None:
    """Why torch_xla cannot run a kernel here (the tensors are its own, so it is there itself)."""
    if importlib.util.find_spec("jax") is None:
        return "jax, with which torch_xla calls a Pallas kernel, is not installed: pip install 'torch-kdk[jax]'"
    if not _installed("torchax") and importlib.util.find_spec("flax") is None:
        # torch_xla's own package holds a torchax, which imports flax.
        return "torchax, with which torch_xla calls a Pallas kernel, is not installed (torch_xla's copy wants flax): pip install torchax"
    return None


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def is_xla(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, Tensor) and a.device.type == "xla" for a in args)


@functools.cache
def target() -> str:
    """The chip of this host, as `--target` names it: v6e. A chip that kdk does not know keeps the vendor's name; empty: unknown."""
    from torch_xla._internal import tpu

    try:
        accelerator = tpu.get_tpu_env()["ACCELERATOR_TYPE"]  # v5litepod-8: the chip, then how many
    except (OSError, KeyError):  # neither environment variables nor a metadata server that says it
        return ""
    name = re.split(r"-\d+$", accelerator)[0]
    return CHIPS.get(name, name)


def run(function: Callable[..., Any], args: tuple[Any, ...], *, interpret: bool = False) -> Any:
    """`function` on tensors of the device xla."""
    import torch_xla.core.xla_builder as xb

    signature = tuple([(a.shape, a.dtype) if isinstance(a, Tensor) else a for a in args])
    tensors = tuple([a for a in args if isinstance(a, Tensor)])
    return xb.call_jax(_of_tensors(function, signature, interpret), tensors)


@functools.cache
def _of_tensors(function: Callable[..., Any], signature: tuple[Any, ...], interpret: bool) -> Callable[..., Any]:
    """`function` with everything but the tensors bound, one for each signature.

    call_jax remembers the structure of a function's results (which gradients are None) from its latest trace, whatever the
    shapes and scalars of the call: a function of one signature has one structure. It knows functions by id: these live on.
    """

    def call(*tensors: Any) -> Any:
        given = iter(tensors)
        args = [next(given) if isinstance(part, tuple) else part for part in signature]
        with on_chip("" if interpret else target()):  # PyTorch/XLA holds the TPU, jax may not see it
            return function(*args, interpret=interpret)

    return call
