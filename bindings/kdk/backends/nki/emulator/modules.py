"""Standing in for the vendor's package: `import nki` finds the emulator."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from . import collectives, isa, language
from .simulator import jit, simulate
from .tensor import NkiTensor

_lock = threading.RLock()
_MARK = "__kdk_emulator__"


@dataclass(frozen=True)
class CompileConfig:
    """Accepted and without effect: the emulator does not compile."""

    address_rotation: Any = None
    non_ssa_legalization: Any = None
    dead_code_elim: Any = None
    barrier_check: Any = None


@dataclass(frozen=True)
class SpecializationConfig:
    """Accepted and without effect: the emulator does not specialise."""

    allow_nested_config_override: Any = None


class _Annotation:
    """nki.typing.tensor[128, 512], an annotation."""

    def __getitem__(self, shape: Any) -> type[NkiTensor]:
        return NkiTensor


def _build() -> ModuleType:
    nki, typing, compiler = (ModuleType(n) for n in ("nki", "nki.typing", "nki.compiler"))
    nki.__doc__ = "NKI, emulated by kdk in NumPy"
    nki.__path__ = []
    typing.tensor = typing.mutable_tensor = _Annotation()  # type: ignore[attr-defined]
    compiler.CompileConfig, compiler.SpecializationConfig = CompileConfig, SpecializationConfig  # type: ignore[attr-defined]
    attributes = {"jit": jit, "simulate": simulate, "language": language, "isa": isa, "typing": typing}
    attributes |= {"compiler": compiler, "collectives": collectives, "dtype": str}
    for name, value in attributes.items():
        setattr(nki, name, value)
    setattr(nki, _MARK, True)
    isa.constants = isa  # type: ignore[attr-defined]
    return nki


def is_emulator(module: Any) -> bool:
    return getattr(module, _MARK, False)


def install() -> ModuleType:
    """Register the emulator as nki, nki.language, nki.isa and nki.typing, and return the nki module."""
    with _lock:
        present = sys.modules.get("nki")
        if present is not None and is_emulator(present):
            return present
        if present is not None and hasattr(present, "simulate"):
            raise RuntimeError(
                f"the vendor's nki is already imported ({getattr(present, '__file__', 'no file')}): use its simulate,"
                " or start Python anew and install the emulator before anything imports nki"
            )
        _forget()
        nki = _build()
        sys.modules.update({"nki": nki, "nki.isa.constants": isa})
        for name in ("language", "isa", "typing", "compiler", "collectives"):
            sys.modules[f"nki.{name}"] = getattr(nki, name)
        return nki


def _forget() -> None:
    """Take nki and its submodules out of sys.modules."""
    for name in [n for n in sys.modules if n == "nki" or n.startswith("nki.")]:
        del sys.modules[name]


def vendor_nki_available() -> bool:
    """Whether `import nki` gives the vendor's package, with `simulate`.

    False while the emulator stands in. The package of that name on PyPI, whose import raises, counts as absent.
    """
    with _lock:
        present = sys.modules.get("nki")
        if present is not None:
            return not is_emulator(present) and hasattr(present, "simulate")
        if importlib.machinery.PathFinder.find_spec("nki") is None:
            return False
        try:
            available = hasattr(importlib.import_module("nki"), "simulate")
        except Exception:  # a placeholder may raise anything; it is not usable either way
            available = False
        if not available:
            _forget()
        return available
