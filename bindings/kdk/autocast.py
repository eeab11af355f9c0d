"""Autocast stays outside: an operator computes in the dtypes that it declares, also where its body multiplies matrices.

Who wants an operator's arguments cast, as autocast casts those of torch's own, does so in `Op.public`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kdk.dispatch import untraced

KEYS = ("CPU", "CUDA", "XPU", "MPS", "XLA", "PrivateUse1")


def shut_out(library: torch.library.Library, torch_op: Any) -> None:
    """Call `torch_op` and all below it, the fake and autograd too, without autocast. Costs nothing where there is none."""

    @untraced
    def call(*args: Any, impl: str = "") -> Any:
        with torch._C._DisableAutocast():
            return torch_op(*args, impl=impl)

    for key in KEYS:
        library.impl(torch_op, call, f"Autocast{key}")


def without_autocast(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """The same for a reference that runs in the place of the operator, on arguments of one device; dynamo traces it."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            kind = value.device.type
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                return torch.autocast(kind, enabled=False)
            break
    return nullcontext()
