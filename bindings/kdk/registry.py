"""The operators there are: found through the entry-point group `kdk.ops`, or in a folder. Imports no torch by itself."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from kdk.errors import DeclarationError, ProviderWarning, UsageError
from kdk.op import Op

if TYPE_CHECKING:
    from kdk.torch_library import Operator

GROUP = "kdk.ops"
OPERATORS: dict[str, Operator] = {}


def require(names: Iterable[str]) -> None:
    """Raise UsageError for a name that no operator has."""
    importlib.import_module("kdk.ops")  # registers the providers' operators
    for name in names:
        if name not in OPERATORS:
            raise UsageError("KDK-OPERATOR", "unknown operator", value=repr(name), limit=f"there are {', '.join(OPERATORS)}")


def load_providers() -> None:
    """Register every operator that an installed package announces. One that cannot be loaded warns and is left out."""
    for entry in sorted(entry_points(group=GROUP), key=lambda e: (e.value != "kdk_kernels", e.name)):
        try:
            load_package(entry.load())
        except Exception as error:
            # Whatever a foreign package raises must not take kdk's own operators away.
            warnings.warn(f"{_origin(entry)} announces kdk operators and cannot be loaded: {error!r}", ProviderWarning, 2)


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name if entry.dist else 'a package'} ({entry.value})"


def load_package(package: ModuleType) -> list[Operator]:
    """Register the operators in the folders of a package."""
    return [_register(module) for module in _folders(package)]


def _folders(package: ModuleType) -> Iterator[ModuleType]:
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if info.ispkg:
            yield importlib.import_module(info.name)


def load_directory(directory: str | Path) -> list[Operator]:
    """Register the operators in a bare folder: either an operator's own folder or a folder of such."""
    path = Path(directory).resolve()
    if not path.is_dir():
        raise UsageError("KDK-DIRECTORY", "no such folder", value=str(directory))
    if (path / "reference.py").exists():
        return [_register(_import_folder(path))]
    folders = [p for p in sorted(path.iterdir()) if (p / "reference.py").exists()]
    if not folders:
        raise UsageError(
            "KDK-DIRECTORY", "no operator in the folder", value=str(directory), limit="an operator's folder has a reference.py"
        )
    return [_register(_import_folder(p)) for p in folders]


def _import_folder(path: Path) -> ModuleType:
    """The folder as a package of its own. Its parent stays off sys.path, where a triton.py in it could hide the real one."""
    name = f"kdk_folder_{path.name}"
    spec = importlib.util.spec_from_file_location(name, path / "__init__.py", submodule_search_locations=[str(path)])
    if spec is None or spec.loader is None or not (path / "__init__.py").exists():
        raise DeclarationError("KDK-DECLARATION", "an operator's folder needs an __init__.py", value=str(path))
    if name in sys.modules:  # its kernels are imported later, by this name
        there = getattr(sys.modules[name], "__path__", ["?"])[0]
        raise DeclarationError("KDK-DECLARATION", "a folder of this name is loaded", value=str(path), limit=f"from {there}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _register(module: ModuleType) -> Operator:
    from kdk.torch_library import register

    op = getattr(module, "op", None)
    if not isinstance(op, Op):
        raise DeclarationError("KDK-DECLARATION", f"{module.__name__} has no `op`", value=repr(op), way_out="op = kdk.Op(...)")
    if op.package != module.__name__:
        limit = f"its reference is in {op.package}.reference"
        raise DeclarationError("KDK-DECLARATION", f"{module.__name__} declares a foreign reference", limit=limit)
    if op.name in OPERATORS:
        raise DeclarationError("KDK-DECLARATION", "two operators have one name", value=f"{op.name} in {module.__name__}")
    OPERATORS[op.name] = operator = register(op)
    return operator
