"""What became of mutants, kept between runs: a file for each unit, written after every mutant. A run that was stopped goes on where
it was, and a run of changed code knows which cases killed most.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kdk.backends import LANGUAGES
from kdk.registry import OPERATORS
from kdk_bench.mutation.trial import Trial
from kdk_bench.mutation.units import Unit, files
from kdk_bench.mutation.workers import Work

JUDGES = ("kdk_bench.mutation.trial", "kdk_bench.mutation.workers", "kdk_bench.mutation.mutants")  # with all that they import
LIBRARIES = ("torch", "numpy", "triton", "jax", "nki")


class Kept:
    """The files of a directory. seed: of the cases and of the sample, which results of another one say nothing about."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.seed = directory, seed
        self.fingerprints: dict[Unit, str] = {}  # of the files as they were when a run began
        directory.mkdir(parents=True, exist_ok=True)
        versions = [f"{name} {_version(name)}" for name in LIBRARIES]
        judges = [_text(name) for name in sorted(imported(JUDGES))]
        kdk = [text for text in _texts("kdk") if not text.startswith(tuple(f"backends/{language}/" for language in LANGUAGES))]
        self.judging = _digest([f"seed {seed}", *versions, *judges, *kdk])

    def fingerprint(self, work: Work) -> str:
        """Equal while a unit's results would be the same: the check, the simulators, the operator and its kernel's files."""
        if work.unit not in self.fingerprints:
            simulator = LANGUAGES[work.unit.language].module("launch").__name__.rpartition(".")[0]
            texts = _texts(OPERATORS[work.unit.op].op.package) + _texts(simulator)
            self.fingerprints[work.unit] = _digest([self.judging, *texts, *(_text(name) for name in sorted(files(work.unit)))])
        return self.fingerprints[work.unit]

    def _path(self, work: Work) -> Path:
        return self.directory / f"{work.unit.op}.{work.unit.direction}.{work.unit.language}.json"

    def restore(self, work: Work) -> None:
        """Put into a unit what an earlier run found out: all of it where nothing changed since, else which cases killed."""
        fingerprint, path = self.fingerprint(work), self._path(work)
        if not path.exists():
            return
        found = json.loads(path.read_text())
        trials = {key: _trial(values) for key, values in found["trials"].items()}
        for trial in trials.values():
            work.count(trial)
        if found["fingerprint"] != fingerprint:
            return
        work.baseline = _trial(found["baseline"])
        work.trials = [(m, trials[m.key]) for m in work.mutants if m.key in trials]
        work.mutants = [m for m in work.mutants if m.key not in trials]

    def save(self, work: Work) -> None:
        """Replace the file at once, so that a run that is stopped here leaves the old one."""
        assert work.baseline is not None
        found = {
            "fingerprint": self.fingerprint(work),
            "baseline": _values(work.baseline),
            "trials": {m.key: _values(t) for m, t in work.trials},
        }
        path = self._path(work)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(found, indent=1))
        os.replace(new, path)


def _values(trial: Trial) -> dict[str, Any]:
    return dataclasses.asdict(trial) | {"lines": sorted(trial.lines)}


def _trial(values: dict[str, Any]) -> Trial:
    step, lines = values["step"], frozenset((module, line) for module, line in values["lines"])
    return Trial(**{**values, "step": None if step is None else tuple(step), "lines": lines})


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _text(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()


def _texts(package: str) -> list[str]:
    """Every Python file of a package, with its name."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    return [f"{p.relative_to(root)}\n{p.read_text()}" for p in sorted(root.rglob("*.py"))]


def imported(modules: Iterable[str]) -> set[str]:
    """These modules of kdk_bench and the others of it that they import, at any depth and wherever in a file."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in found or not _is_module(name):
            continue
        found.add(name)
        for node in ast.walk(ast.parse(_text(name))):
            if isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
    return found


def _is_module(name: str) -> bool:
    """Of kdk_bench; "kdk_bench.numerics.Pool" is none."""
    try:
        return name.startswith("kdk_bench") and importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
