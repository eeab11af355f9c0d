"""Pallas kernels on CPU tensors, interpreted by jax. On tensors of PyTorch/XLA's CPU: torch_xla.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kdk.backends.pallas import faults, torch_xla
from kdk.backends.pallas.faults import exact, look_for_faults
from kdk.backends.pallas.mxu import products_in_one_pass


@functools.cache
def _compiled(function: Callable[..., Any], static: tuple[int, ...]) -> Callable[..., Any]:
    import jax

    def interpreted(*args: Any) -> Any:
        return function(*args, interpret=True)

    return jax.jit(interpreted, static_argnums=static, compiler_options=exact())


def forget() -> None:
    """Drop the functions that were compiled for kernels."""
    _compiled.cache_clear()
    faults.forget()


def to_jax(t: Tensor) -> Any:
    """The same bytes as a jax array; a strided tensor is copied (Pallas takes none)."""
    import jax

    t = t.detach().contiguous()
    if t.dim() == 0:  # dlpack keeps no layout for scalars of every dtype
        return jax.numpy.asarray(t.item(), str(t.dtype).removeprefix("torch."))
    return jax.dlpack.from_dlpack(t)


def to_torch(array: Any) -> Tensor:
    """The same bytes as a torch tensor that may be written to."""
    return torch.from_dlpack(array)


def run_simulated(function: Callable[..., Any], args: tuple[Any, ...], target: str) -> Any:
    """`function` on CPU tensors with `interpret=True`: values as on a TPU's kernel, without its memory spaces. A product of float32
    operands is one pass in bfloat16 unless it says `precision=jax.lax.Precision.HIGHEST`.

    Small problems are looked through for faults first (`look_for_faults` says what is small): SimulationError.
    On xla tensors they are not: what runs there is a program of XLA's, without the TPU's memory and DMAs.
    """
    if torch_xla.is_xla(args):
        return torch_xla.run(function, args, interpret=True)
    import jax

    static = tuple(i for i, a in enumerate(args) if not isinstance(a, Tensor) and a is not None)
    with jax.default_device(jax.devices("cpu")[0]), products_in_one_pass():
        arrays = [to_jax(a) if isinstance(a, Tensor) else a for a in args]
        look_for_faults(function, static, arrays)
        result = _compiled(function, static)(*arrays)
        jax.block_until_ready(result)
    if isinstance(result, tuple | list):
        return tuple([None if r is None else to_torch(r) for r in result])
    return to_torch(result)
