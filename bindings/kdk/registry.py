"""The operators there are: found through the entry-point group `kdk.ops`, or in a folder. Imports no torch by itself."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import traceback
import warnings
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from kdk.errors import DeclarationError, KdkError, ProviderWarning, UsageError
from kdk.op import Op

if TYPE_CHECKING:
    from kdk.torch_library import Operator

GROUP, OWN = "kdk.ops", "kdk_kernels"
OPERATORS: dict[str, Operator] = {}


def require(names: Iterable[str]) -> None:
    """Raise UsageError for a name that no operator has."""
    importlib.import_module("kdk.ops")  # registers the providers' operators
    for name in names:
        if name not in OPERATORS:
            raise UsageError("KDK-OPERATOR", "unknown operator", value=repr(name), limit=f"there are {', '.join(OPERATORS)}")


def load_providers() -> None:
    """Register every operator that a package announces. One that cannot be loaded warns and is left out."""
    for entry in sorted(_announced(), key=lambda e: (e.value != OWN, e.name)):
        origin = f"{entry.dist.name if entry.dist else 'a package'} ({entry.value})"
        try:
            folders = _folders(entry.load())
        except Exception as error:
            # Whatever a foreign package raises must not take other operators away: here, and folder by folder below.
            _leave_out(f"{origin} announces kdk operators and", error)
            continue
        for name in folders:
            try:
                _register(importlib.import_module(name))
            except Exception as error:
                _leave_out(f"{origin}: the operator in {name}", error)


def _announced() -> list[EntryPoint]:
    """What the installed packages announce; and kdk's own operators of a checkout that is not installed, where nothing does."""
    entries = list(entry_points(group=GROUP))
    if not any(e.value == OWN for e in entries) and importlib.util.find_spec(OWN):
        entries.append(EntryPoint("kdk", OWN, GROUP))
    return entries


def _leave_out(what: str, error: Exception) -> None:
    warnings.warn(f"{what} cannot be loaded, and is left out: {_say(error)}", ProviderWarning, stacklevel=4)


def _folders(package: ModuleType) -> list[str]:
    """Import names of the folders in a package."""
    return [info.name for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}.") if info.ispkg]


def _say(error: Exception) -> str:
    """An exception in one line, with the place where it was raised."""
    if isinstance(error, KdkError):
        return error.text
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, SyntaxError):
        return text  # it names file and line itself
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({Path(last.filename).name}, line {last.lineno})"


def load_directory(directory: str | Path) -> list[Operator]:
    """Register the operators in a bare folder: either an operator's own folder or a folder of such."""
    path = Path(directory).resolve()
    if not path.is_dir():
        raise UsageError("KDK-DIRECTORY", "no such folder", value=str(directory))
    if (path / "reference.py").exists():
        return [_register(_import_folder(path))]
    folders = [p for p in sorted(path.iterdir()) if (p / "reference.py").exists()]
    if not folders:
        limit = "an operator's folder has a reference.py"
        way_out = "give such a folder, or one that holds such folders; docs/new-operator.md makes one"
        raise UsageError("KDK-DIRECTORY", "no operator in the folder", value=str(directory), limit=limit, way_out=way_out)
    return [_register(_import_folder(p)) for p in folders]


def _import_folder(path: Path) -> ModuleType:
    """The folder as a package of its own. Its parent stays off sys.path, where a triton.py in it could hide the real one."""
    name = f"kdk_folder_{path.name}"
    spec = importlib.util.spec_from_file_location(name, path / "__init__.py", submodule_search_locations=[str(path)])
    if spec is None or spec.loader is None or not (path / "__init__.py").exists():
        way_out = "write one that says op = kdk.Op(...)"
        raise DeclarationError("KDK-DECLARATION", "an operator's folder needs an __init__.py", value=str(path), way_out=way_out)
    if name in sys.modules:  # its kernels are imported later, by this name
        limit = f"from {getattr(sys.modules[name], '__path__', ['?'])[0]}"
        way_out = "rename one of the folders"
        raise DeclarationError("KDK-DECLARATION", "a folder of this name is loaded", value=str(path), limit=limit, way_out=way_out)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[loaded]
        if isinstance(error, KdkError) or not isinstance(error, Exception):
            raise
        way_out = "the folder's __init__.py and reference.py must import; they need torch and no kernel language"
        problem = f"the operator's folder {path.name} cannot be imported"
        raise DeclarationError("KDK-DECLARATION", problem, value=_say(error), way_out=way_out) from error
    return module


def _register(module: ModuleType) -> Operator:
    from kdk.torch_library import register

    op = getattr(module, "op", None)
    if not isinstance(op, Op):
        raise DeclarationError("KDK-DECLARATION", f"{module.__name__} has no `op`", value=repr(op), way_out="op = kdk.Op(...)")
    if op.package != module.__name__:
        limit = f"its reference is in {op.package}.reference"
        way_out = "write the reference in the folder's own reference.py"
        raise DeclarationError("KDK-DECLARATION", f"{module.__name__} declares a foreign reference", limit=limit, way_out=way_out)
    if op.name in OPERATORS:
        value, limit = f"{op.name} in {module.__name__}", f"{OPERATORS[op.name].op.package} has it"
        way_out = "give the reference another name"
        raise DeclarationError("KDK-DECLARATION", "two operators have one name", value=value, limit=limit, way_out=way_out)
    try:
        operator = register(op)
    except Exception as error:
        problem, value = f"torch does not take the signatures of {op.name}", " ".join(str(error).split())
        way_out = "the reference and its backward annotate every argument and result: Tensor, int, float, bool, str, torch.dtype, Optional"
        raise DeclarationError("KDK-DECLARATION", problem, value=value, way_out=way_out) from error
    OPERATORS[op.name] = operator
    return operator
