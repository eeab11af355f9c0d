"""kdk: custom kernels for PyTorch, checked against one reference. `import kdk.ops` brings the operators (and torch)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kdk import errors
from kdk.errors import FallbackWarning
from kdk.op import Op
from kdk.selection import set_default, simulate, strict, use

if TYPE_CHECKING:
    from kdk import ops, random
    from kdk.patching import patch, unpatch
    from kdk.recording import record

__version__ = "0.1.0"
__all__ = [
    "FallbackWarning",
    "Op",
    "errors",
    "ops",
    "patch",
    "random",
    "record",
    "set_default",
    "simulate",
    "strict",
    "unpatch",
    "use",
]
# These need torch, or the operators: `import kdk` stays light.
_LATE = {"ops": "kdk.ops", "random": "kdk.random", "patch": "kdk.patching", "unpatch": "kdk.patching", "record": "kdk.recording"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'kdk' has no attribute {name!r}")
    module = importlib.import_module(_LATE[name])
    value = module if module.__name__ == f"kdk.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What is imported late is there, too."""
    return sorted({*globals(), *__all__})
