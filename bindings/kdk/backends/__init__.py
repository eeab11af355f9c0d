"""Kernel languages. A package each, with launch.py (device), simulate.py (CPU) and compile.py (ahead of time).

What a language is, without importing it or torch, stands in its package's `LANGUAGE`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal


@dataclass(frozen=True)
class Language:
    """A kernel language.

    platforms: where it is the native choice. targets: chips it can be simulated or compiled for, the first is the default.
    dtypes: names of the torch dtypes of a kernel's tensors. no_dtype: why it has not some others.
    simulated: platforms where a kernel that was asked for by name runs in a simulator.
    names_dtypes: its kernels know no torch.dtype: an argument that is one comes as its name ("int8").
    strided: its results have strides; if not they are contiguous, and the binding lays them out as `Op.layouts` promises.
    """

    name: str
    platforms: tuple[str, ...]
    targets: tuple[str, ...]
    dtypes: frozenset[str]
    no_dtype: Mapping[str, str] = field(default_factory=dict)
    simulated: tuple[str, ...] = ("cpu",)
    strided: bool = True
    names_dtypes: bool = True

    def module(self, part: str) -> ModuleType:
        """`launch`, `simulate` or `compile` of this language, imported at first use."""
        return importlib.import_module(f"{__name__}.{self.name}.{part}")


@dataclass(frozen=True)
class Compiled:
    """What ahead-of-time compilation for a target gave: `compile_for` of a language's compile.py. Can be pickled.

    compiled: whatever `exceeded` says; refused: by the compiler, with its reason in one line; failed: the kernel's own Python
    raised; unknown: it could not be found out. exceeded: the budgets that the kernel breaks (spills, limits of the chip).
    evidence: what the result is worth. text: the compiler's final program, where a caller reads it.
    """

    target: str
    outcome: Literal["compiled", "refused", "failed", "unknown"]
    reason: str = ""
    resources: Mapping[str, Any] = field(default_factory=dict)
    exceeded: tuple[str, ...] = ()
    evidence: str = "compiled"
    text: str = ""


def one_line(text: object, limit: int = 500) -> str:
    """A message without line breaks, and not longer than a reader takes."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def _discover() -> dict[str, Language]:
    found = {}
    for module in pkgutil.iter_modules(__path__):
        language = importlib.import_module(f"{__name__}.{module.name}").LANGUAGE
        found[language.name] = language
    return found


LANGUAGES: dict[str, Language] = _discover()
TARGETS: dict[str, str] = {target: language.name for language in LANGUAGES.values() for target in language.targets}
