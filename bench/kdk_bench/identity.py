"""Whether `kdk` is this kdk: another project has the name too. Imports nothing of kdk, which may be that other one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

NAME = "torch-kdk"


def others(ours: Path, directory: str | None = None) -> list[str]:
    """What else is called kdk, and how to get rid of it. ours: the folder of this kdk. directory: where Python is started."""
    found = []
    try:
        summary = metadata("kdk").json.get("summary") or "no summary"
        found.append(
            f"the distribution `kdk` is installed, which is another project ({summary}) and writes into the same folder and the same"
            f" command. Way out: pip uninstall kdk, then pip install --force-reinstall --no-deps {NAME}"
        )
    except PackageNotFoundError:
        pass
    here = os.getcwd() if directory is None else directory
    paths = [p for p in sys.path if p]
    for where, search in (("Python with this sys.path", paths), (f"Python started in {here}", [here, *paths])):
        folder = _imported(search)
        if folder is not None and folder.resolve() != ours.resolve():
            found.append(f"{where} imports `kdk` from {folder} instead of {ours}. Way out: rename that folder, or start elsewhere")
            break
    return found


def _imported(search: Sequence[str]) -> Path | None:
    """The folder that `import kdk` takes from these paths. Even one without __init__.py goes before an editable install."""
    spec = PathFinder.find_spec("kdk", search)
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin or "kdk")


def explain(error: ImportError) -> str:
    """For a command line that cannot import its own kdk."""
    module = sys.modules.get("kdk")
    where = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ["nowhere"])))
    return (
        f"kdk: [KDK-SHADOWED] `import kdk` finds another package: got {where} ({error}). Way out: pip uninstall kdk if that is the"
        f" other project of this name; rename a folder `kdk` that lies on sys.path; then pip install --force-reinstall --no-deps {NAME}"
    )
