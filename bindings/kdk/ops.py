"""The operators: `import kdk.ops`, then `kdk.ops.rms_norm(x, weight, 1e-6)`. Also torch.ops.kdk.<name>."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from kdk import registry
from kdk.checkpointing import keep_the_choice
from kdk.errors import UsageWarning
from kdk.selection import DEFAULT, EVERY, STRICT

keep_the_choice()
registry.load_providers()
for _name in DEFAULT:  # from KDK_USE; no error, a folder loaded later may have it
    if _name not in (EVERY, STRICT, *registry.OPERATORS):
        _there = ", ".join(registry.OPERATORS)
        warnings.warn(f"KDK_USE names {_name!r}, which is no operator; there are {_there}", UsageWarning, stacklevel=2)
globals().update({name: operator.public for name, operator in registry.OPERATORS.items()})


def __getattr__(name: str) -> Callable[..., Any]:
    operator = registry.OPERATORS.get(name)
    if operator is None:
        if name.startswith("_"):
            raise AttributeError(name)
        there = ", ".join(registry.OPERATORS)
        raise AttributeError(f"module 'kdk.ops' has no operator {name!r}; there are {there}", name=name, obj=None)
    return operator.public


def __dir__() -> list[str]:
    return sorted(registry.OPERATORS)
