"""Kernels in the graph of a compiler that knows no kdk operator.

torch.compile keeps a kdk operator as one node. Inductor calls what it does not know; the compiler of an accelerator that
makes one program of a graph cannot. For such a platform the operator is opened when the graph becomes functional, below
autograd, as torch.library.triton_op does it: its body runs on the graph's tensors, and the kernel's own operator, or
the plain torch of an implementation without kernel, stands in the graph. An exported program keeps the kdk operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.compiler import is_exporting

from kdk.dispatch import first_tensor
from kdk.platforms import platform

OPENED = ("neuron",)


def open_in_graphs(library: torch.library.Library, torch_op: Any, body: Callable[..., Any]) -> None:
    """Let `body` stand for `torch_op` in graphs of the platforms that need it."""

    def rule(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if platform(first_tensor(args).device.type) not in OPENED or is_exporting():
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return body(*args, **kwargs)

    torch.library.register_torch_dispatch(torch_op, FunctionalTensorMode, rule, lib=library)
