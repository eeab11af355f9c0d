"""The device "neuron": PrivateUse1 renamed, in Python. A tensor's data lies in a CPU tensor behind it, always contiguous.

Every aten operator runs on the CPU tensors. A view that is not contiguous is a copy: writes to it are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from kdk.backends.nki.emulator import TensorSpec

LIBRARIES: list[torch.library.Library] = []
DATA: dict[int, Tensor] = {}  # by storage: torch makes tensors of its own that share one, such as those in .grad
OPERATORS: list[tuple[str, bool]] = []  # what ran outside kernels, in order, and whether it read floating-point numbers


def _is_here(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "neuron" and not is_fake(x)


def _unwrap(x: Any) -> Any:
    return DATA[x.untyped_storage()._cdata] if _is_here(x) else x


def _wrap(x: Any) -> Any:
    if not isinstance(x, Tensor) or x.device.type == "neuron":
        return x
    tensor = torch._C._acc.create_empty_tensor(tuple(x.shape), x.dtype)
    DATA[tensor.untyped_storage()._cdata] = x.contiguous()
    return tensor


def _tensors(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers that came as tensors of no dimension and were unpacked on the way here are tensors again."""
    asks = [str(parameter.type) == "Tensor" for parameter in op._schema.arguments]
    return tuple([torch.tensor(a) if asked and isinstance(a, int | float) else a for a, asked in zip(args, asks)])


def _run_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    args = _tensors(op, args)
    OPERATORS.append((op.name(), any(isinstance(a, Tensor) and a.is_floating_point() for a in tree_leaves(args))))
    if op is torch.ops.aten._copy_from.default:
        _unwrap(args[1]).copy_(_unwrap(args[0]))
        return args[1]
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu"}
    result = op(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
    # out= and in-place operators return their argument; an out= without elements has been made as large as the result
    given = {id(_unwrap(x)): x for x in (*args, *kwargs.values()) if _is_here(x)}
    for cpu in tree_leaves(result):
        if id(cpu) in given and given[id(cpu)].shape != cpu.shape:
            given[id(cpu)].data = _wrap(cpu)
    return tree_map(lambda x: given[id(x)] if id(x) in given else _wrap(x), result)


def register() -> None:
    """Make torch know the device, once."""
    if LIBRARIES:
        return
    _setup_privateuseone_for_python_backend("neuron")
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run_on_cpu, "PrivateUse1")
    LIBRARIES.append(library)


def is_fake(x: Any) -> bool:
    return isinstance(x, FakeTensor)


def launch(simulation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A kernel on the device's tensors."""
    for a in args:
        if isinstance(a, Tensor) and a.device.type not in ("neuron", "xla"):
            raise TypeError(f"a kernel was called with a tensor on {a.device}")
    if any(isinstance(a, Tensor) and a.device.type == "xla" for a in args):  # a CPU tensor that says so
        return simulation(*[a.as_subclass(Tensor) if isinstance(a, Tensor) else a for a in args])
    return tree_map(_wrap, simulation(*tree_map(_unwrap, args)))


def shapes(simulation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What the kernel returns, as fake tensors."""

    def spec(x: Any) -> Any:
        return TensorSpec(tuple(x.shape), str(x.dtype).removeprefix("torch.")) if isinstance(x, Tensor) else x

    def empty(x: TensorSpec) -> Tensor:
        return torch.empty(x.shape, dtype=getattr(torch, x.dtype), device="neuron")

    result = simulation(*[spec(a) for a in args])
    return tuple(map(empty, result)) if isinstance(result, tuple) else empty(result)


def copy_of(x: Any) -> Any:
    return _unwrap(x).clone() if _is_here(x) else x


def same(x: Any, copy: Any) -> bool:
    if not _is_here(x):
        return True
    return torch.equal(_unwrap(x).reshape(-1).view(torch.uint8), copy.reshape(-1).view(torch.uint8))
