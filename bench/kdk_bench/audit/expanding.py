"""Composites of several kernels: what a platform runs that has no kernel of its own for them."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

EXPLICIT = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
CHILDREN: dict[str, tuple[str, ...] | None] = {}
"""Operator -> the operators that torch's composite of it calls, of those that ran; None where there is none or it did not run."""


def name_of(func: Any) -> str:
    """ "aten::add.Tensor"; the default overload has no suffix."""
    name, overload = func._schema.name, func._overloadname
    return str(name) if overload == "default" else f"{name}.{overload}"


class _Names(TorchDispatchMode):
    """Collects the operators that run, each expanded in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(name_of(func))
        children(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def children(func: Any, args: Any, kwargs: Any) -> tuple[str, ...]:
    """The operators that torch's own composite of `func` calls, () where it has none.

    The composite runs once more, on copies of what it would change. A kernel run directly on tensors without data ends the process.
    """
    name = name_of(func)
    if name in CHILDREN or any(isinstance(t, FakeTensor) or _nested(t) for t in tree_flatten((args, kwargs))[0]):
        return CHILDREN.get(name) or ()
    CHILDREN[name] = None
    # Asking for a kernel that is not there ends the process, so the dispatcher is asked first.
    keys = [key for key in EXPLICIT if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)]
    if keys and func.namespace == "aten":
        copy = _clone if func._schema.is_mutable else _detach
        args, kwargs = tree_map(copy, args), tree_map(copy, kwargs)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), _Names() as names:
                func._op_dk(getattr(torch._C.DispatchKey, keys[0]), *args, **kwargs)
            CHILDREN[name] = tuple(dict.fromkeys(n for n in names.names if n != name))
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
            pass  # not for these arguments: then nothing is known about it
    return CHILDREN[name] or ()


def _nested(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
