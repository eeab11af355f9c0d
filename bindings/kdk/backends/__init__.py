"""Kernel languages. A package each, with launch.py (device), simulate.py (CPU) and compile.py (ahead of time).

What a language is, without importing it or torch, stands in its package's `LANGUAGE`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType


@dataclass(frozen=True)
class Language:
    """A kernel language.

    platforms: where it is the native choice. targets: chips it can be simulated or compiled for, the first is the default.
    dtypes: names of the torch dtypes of a kernel's tensors. no_dtype: why it has not some others.
    simulated: platforms where a kernel that was asked for by name runs in a simulator.
    strided: its results have strides; if not they are contiguous, and the binding lays them out as `Op.layouts` promises.
    """

    name: str
    platforms: tuple[str, ...]
    targets: tuple[str, ...]
    dtypes: frozenset[str]
    no_dtype: Mapping[str, str] = field(default_factory=dict)
    simulated: tuple[str, ...] = ("cpu",)
    strided: bool = True

    def module(self, part: str) -> ModuleType:
        """`launch`, `simulate` or `compile` of this language, imported at first use."""
        return importlib.import_module(f"{__name__}.{self.name}.{part}")


def _discover() -> dict[str, Language]:
    found = {}
    for module in pkgutil.iter_modules(__path__):
        language = importlib.import_module(f"{__name__}.{module.name}").LANGUAGE
        found[language.name] = language
    return found


LANGUAGES: dict[str, Language] = _discover()
TARGETS: dict[str, str] = {target: language.name for language in LANGUAGES.values() for target in language.targets}
