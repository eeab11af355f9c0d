"""Public NKI kernels in the emulator: which run, which agree with a reference, which are refused and why.

    python -m kdk_bench.nki_conformance --sdk DIR --nki-library DIR --nkipy DIR --nki-samples DIR

The directories are checkouts of aws-neuron/aws-neuron-sdk, nki-library, nkipy and nki-samples; none of their code is
part of this project. Inputs and references are ours, except where a checkout has a torch reference beside its kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kdk.backends.nki import emulator
from kdk_bench import (  # noqa: F401  (they register their cases)
    nki_conformance_attention,
    nki_conformance_library,
    nki_conformance_mlp,
    nki_conformance_moe,
    nki_conformance_mx,
)
from kdk_bench.nki_conformance_cases import CASES, Case

WIDTH = 150  # columns where there is no terminal to ask


def reach(root: Path, case: Case) -> None:
    """The case's package, or the folder of its file, on Python's path."""
    source = str(root / case.package if case.package else (root / case.file).parent)
    if source not in sys.path:
        sys.path.insert(0, source)


def load_module(root: Path, case: Case) -> ModuleType:
    """A kernel's file: by its path, or by its dotted name inside a package of the checkout."""
    if case.package:
        return importlib.import_module(case.file)
    path = root / case.file
    spec = importlib.util.spec_from_file_location(f"conformance_{path.stem.replace('-', '_')}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_arrays(value: Any) -> list[np.ndarray]:
    """A result as a flat list of float64 arrays."""
    if isinstance(value, (tuple, list)):
        return [a for v in value for a in as_arrays(v)]
    if isinstance(value, dict):
        return [a for v in value.values() for a in as_arrays(v)]
    if hasattr(value, "detach"):
        return [value.detach().double().numpy()]
    return [np.asarray(value).astype(np.float64)]


def compare(got: Any, want: Any, tolerance: float) -> str:
    """ "agrees", or by how much it does not; relative to the scale of each expected array."""
    ours, theirs = as_arrays(got), as_arrays(want)
    if len(ours) != len(theirs):
        return f"{len(ours)} results, expected {len(theirs)}"
    worst = 0.0
    for a, b in zip(ours, theirs):
        if a.size != b.size:
            return f"shape {a.shape}, expected {b.shape}"
        a = a.reshape(b.shape)
        scale = float(np.abs(b).max()) or 1.0
        worst = np.fmax(worst, float(np.abs(a - b).max()) / scale) if np.isfinite(a).all() else float("inf")
    return "agrees" if worst <= tolerance else f"differs by {worst:.2g} of the largest value, tolerance {tolerance:.2g}"


def run_case(root: Path, case: Case) -> dict[str, Any]:
    """One case as a row of the table."""
    row: dict[str, Any] = {"repository": case.repository, "kernel": case.name, "target": case.target, "instructions": None}
    row["changed"] = case.around is not contextlib.nullcontext
    started = time.perf_counter()
    reach(root, case)
    try:
        with contextlib.redirect_stdout(io.StringIO()), case.around():
            module = load_module(root, case)
            kernel = case.entry(module) if case.entry else getattr(module, case.function)
            args, kwargs, want = case.build(module)
            kernel = kernel if isinstance(kernel, emulator.Kernel) else emulator.jit(kernel)
            simulation = emulator.simulate(kernel[case.grid] if case.grid else kernel, target=case.target, frontend=case.frontend)
            got = simulation(*args, **kwargs)
        row["instructions"] = len(simulation.trace)
        got, want = want(got) if callable(want) else (got, want)
        row["outcome"] = "runs" if want is None else compare(got, want, case.tolerance)
        if case.refused:
            row["outcome"] = f"accepted, expected {case.refused}"
    except Exception as error:
        kind = error.code if isinstance(error, emulator.NkiValidationError) else type(error).__name__
        expected, _, part = case.refused.partition(": ")
        text = str(error)
        if not isinstance(error, emulator.NkiValidationError):
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{kind}: {text} ({os.path.basename(where.filename)}:{where.lineno})"
        row["outcome"] = f"refused as it should be ({kind})" if kind == expected and part in text else f"refused: {text}"
    row["passed"] = row["outcome"] in ("agrees", "runs") or row["outcome"].startswith("refused as")
    if case.refused and row["passed"]:
        row["outcome"] += f": {inspect.getdoc(case.build)}"
    row["seconds"] = round(time.perf_counter() - started, 2)
    return row


def select(roots: dict[str, Path], pattern: str) -> Iterator[tuple[Path, Case]]:
    for case in CASES:
        if case.repository in roots and pattern in case.name:
            yield roots[case.repository], case


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="Public kernels in the NKI emulator")
    for column in ("repository", "kernel", "target", "instructions", "seconds", "outcome"):
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = [str("" if row[c] is None else row[c]) for c in ("repository", "kernel", "target", "instructions", "seconds")]
        table.add_row(*map(escape, (*cells, row["outcome"])), style=None if row["passed"] else "red")
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    console.print(summary(rows))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How many cases ended how; "refused" only where the documents ask for the refusal."""
    agree = [row for row in rows if row["outcome"] == "agrees"]
    changed = sum(row["changed"] for row in agree)
    runs = sum(row["outcome"] == "runs" for row in rows)
    refused = sum(row["passed"] for row in rows) - len(agree) - runs
    failed = len(rows) - len(agree) - runs - refused
    return (
        f"{len(rows)} cases: {len(agree)} agree with a reference ({changed} after a repair that the case describes),"
        f" {runs} run without one, {refused} refused as they should be, {failed} fail"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for repository in ("sdk", "nki-library", "nkipy", "nki-samples"):
        parser.add_argument(f"--{repository}", type=Path, metavar="DIR", help=f"checkout of {repository}")
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels whose name contains TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    options = parser.parse_args()
    given = {"sdk": options.sdk, "nki-library": options.nki_library, "nkipy": options.nkipy, "nki-samples": options.nki_samples}
    roots = {name: path for name, path in given.items() if path is not None}
    if not roots:
        parser.error("give at least one checkout")
    emulator.install()
    rows = [run_case(root, case) for root, case in select(roots, options.only)]
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
