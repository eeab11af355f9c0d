"""The operators: `import kdk.ops`, then `kdk.ops.rms_norm(x, weight, 1e-6)`. Also torch.ops.kdk.<name>."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdk import registry
from kdk.checkpointing import keep_the_choice

keep_the_choice()
registry.load_providers()
globals().update({name: operator.call for name, operator in registry.OPERATORS.items()})


def __getattr__(name: str) -> Callable[..., Any]:
    operator = registry.OPERATORS.get(name)
    if operator is None:
        if name.startswith("_"):
            raise AttributeError(name)
        there = ", ".join(registry.OPERATORS)
        raise AttributeError(f"module 'kdk.ops' has no operator {name!r}; there are {there}", name=name, obj=None)
    return operator.call


def __dir__() -> list[str]:
    return sorted(registry.OPERATORS)
