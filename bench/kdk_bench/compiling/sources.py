"""What a compilation depends on, as one number: the kernel's source and all that it imports of its own package and of kdk, the
versions, the case and the target. A stored result is used while that number is the same."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs

from kdk.backends import LANGUAGES
from kdk_bench.records import environment


def cache() -> Path:
    """The folder with stored results: the user's cache."""
    return Path(platformdirs.user_cache_dir("kdk")) / "compile"


@functools.cache
def _spec(module: str) -> tuple[Path, bool] | None:
    """The file of a module, and whether it is a package's. Imports its parents, which are operators' and kdk's own packages."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin), spec.submodule_search_locations is not None


def _imports(module: str, file: Path, is_package: bool) -> Iterator[str]:
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@functools.cache
def files_behind(module: str) -> tuple[Path, ...]:
    """The files of a module and of all that it imports from its own top-level package and from kdk, and their packages' folders."""
    roots = {module.partition(".")[0], "kdk"}
    found: dict[str, Path] = {}
    left = [module]
    while left:
        name = left.pop()
        if name in found or name.partition(".")[0] not in roots:
            continue
        spec = _spec(name)
        if spec is None:
            continue
        found[name] = spec[0]
        left += _imports(name, *spec)
    return tuple(sorted(set(found.values())))


@functools.cache
def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@functools.cache
def _compilers(language: str) -> tuple[Path, ...]:
    """kdk's own part: the language's package, and what describes the arguments."""
    import kdk.backends

    folder = Path(kdk.backends.__file__).parent / LANGUAGES[language].name
    return (*sorted(folder.rglob("*.py")), *sorted(Path(__file__).parent.glob("*.py")))


def key(kernel: str, package: str, language: str, what: dict[str, Any]) -> str:
    """The number of a compilation. kernel: the import name of its file, which may be another operator's; package: of the operator's
    folder. what: operator, direction, case, dtype, target."""
    folders = {spec[0].parent for spec in (_spec(kernel), _spec(package)) if spec is not None}
    own = sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in (".py", ".json"))
    files = [_digest(file) for file in (*files_behind(kernel), *own, *_compilers(language))]
    text = json.dumps({"files": files, "environment": environment(), **what}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def load(number: str) -> dict[str, Any] | None:
    """A stored result, or None."""
    try:
        return dict(json.loads((cache() / f"{number}.json").read_text()))
    except (OSError, ValueError):
        return None


def store(number: str, result: dict[str, Any]) -> None:
    """Keep a result. Where the folder cannot be written to, the next run computes it again."""
    try:
        cache().mkdir(parents=True, exist_ok=True)
        partial = cache() / f"{number}.{hashlib.sha256(repr(result).encode()).hexdigest()[:8]}"
        partial.write_text(json.dumps(result, default=str))
        partial.replace(cache() / f"{number}.json")
    except OSError:
        return
