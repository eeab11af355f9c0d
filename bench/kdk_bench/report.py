"""Results as tables for people, JSON for programs, and annotations for GitHub."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kdk.errors import UsageError
from kdk_bench.records import environment, today

if TYPE_CHECKING:
    from kdk_bench.check import Result

PASSED, FAILED, REFUSED, UNINFORMATIVE, UNKNOWN = "passed", "failed", "refused", "uninformative", "unknown"


def check_json(results: Iterable[Result]) -> dict[str, Any]:
    """The report `kdk.check/1`."""
    rows = [
        {
            "op": r.row.op,
            "direction": r.row.direction,
            "implementation": r.row.implementation,
            "target": r.row.target,
            "case": r.case,
            "dtype": r.row.dtype,
            "outcome": r.outcome,
            "error_ratio": r.error_ratio,
            "reason": r.reason,
            "reproduce": r.reproduce,
            "evidence": r.evidence,
            "environment": environment(),
            "date": today(),
        }
        for r in results
    ]
    return {"schema": "kdk.check/1", "results": rows}


def write_json(report: Mapping[str, Any], destination: str) -> None:
    """To a file, or to standard output for "-"."""
    text = json.dumps(report, indent=1, allow_nan=False, default=str)
    if destination == "-":
        print(text)
    else:
        write(text + "\n", destination, "the report", "--json - prints it")


def write(text: str, destination: str, what: str, way_out: str) -> None:
    """To a file; UsageError where that cannot be written."""
    try:
        Path(destination).write_text(text)
    except OSError as error:
        limit = error.strerror or str(error)
        raise UsageError("KDK-JSON", f"{what} cannot be written", value=destination, limit=limit, way_out=way_out) from None


def exit_code(results: Sequence[Result]) -> int:
    """0 holds, 1 a result failed, 3 nothing failed and something could not be determined."""
    outcomes = {r.outcome for r in results}
    return 1 if FAILED in outcomes else 3 if UNKNOWN in outcomes or not results else 0


def _cell(results: Sequence[Result]) -> str:
    """One cell of the table: the outcome of all dtypes and cases of an operator's direction in one implementation."""
    by = {o: [r for r in results if r.outcome == o] for o in (PASSED, FAILED, REFUSED, UNINFORMATIVE, UNKNOWN)}
    refused_dtypes = sorted({r.row.dtype for r in by[REFUSED]} - {r.row.dtype for r in by[PASSED] + by[FAILED]})
    parts = []
    if by[FAILED]:
        parts.append(f"[red]failed {len(by[FAILED])}[/] of {len(results)}")
    elif by[PASSED]:
        worst = max((r.error_ratio or 0.0 for r in by[PASSED]), default=0.0)
        parts.append(f"[green]passed {len(by[PASSED])}[/], worst {worst:.2f}")
    if by[UNINFORMATIVE]:
        parts.append(f"{len(by[UNINFORMATIVE])} uninformative")
    if by[UNKNOWN]:
        parts.append(f"[yellow]unknown {len(by[UNKNOWN])}[/]")
    if refused_dtypes:
        parts.append(f"[yellow]refused {'' if by[PASSED] or by[FAILED] else 'all: '}{', '.join(refused_dtypes)}[/]")
    elif by[REFUSED]:
        parts.append(f"[yellow]refused {len(by[REFUSED])}[/]")
    return "\n".join(parts)


def check_table(results: Sequence[Result], console: Console) -> None:
    """Operator x direction x implementation, then what failed (with the line that reproduces it) and what was refused."""
    columns = list(dict.fromkeys((r.row.implementation, r.row.target) for r in results))
    evidence = {(r.row.implementation, r.row.target): r.evidence for r in results}
    table = Table(title="kdk check: error of the worst case as a share of its limit", title_justify="left")
    table.add_column("operator", overflow="fold")
    table.add_column("direction")
    for implementation, target in columns:
        table.add_column(f"{implementation}\n{target}, {evidence[implementation, target]}", overflow="fold")
    for op, direction in dict.fromkeys((r.row.op, r.row.direction) for r in results):
        mine = [r for r in results if (r.row.op, r.row.direction) == (op, direction)]
        cells = [_cell([r for r in mine if (r.row.implementation, r.row.target) == column]) for column in columns]
        table.add_row(op, direction, *cells)
    console.print(table)
    _failures([r for r in results if r.outcome == FAILED], console)
    for outcome in (REFUSED, UNKNOWN):
        reasons: dict[str, list[str]] = {}
        for r in results:
            if r.outcome == outcome:
                reasons.setdefault(f"{r.row.implementation}: {r.reason}", []).append(f"{r.row.op}.{r.row.direction}")
        for reason, where in reasons.items():
            console.print(f"[yellow]{outcome}[/] {escape(reason)} [dim]({', '.join(dict.fromkeys(where))})[/]")


def _failures(failed: Sequence[Result], console: Console) -> None:
    """Per row the smallest failing case in full, the others by name."""
    for row in dict.fromkeys(r.row for r in failed):
        mine = sorted((r for r in failed if r.row == row), key=lambda r: (not r.rank, r.rank))
        first = mine[0]
        console.print(f"\n[red]failed[/] [bold]{row}[/]: {escape(first.case)}\n  {escape(first.reason)}")
        if first.reproduce:
            console.print(f"  reproduce: {escape(first.reproduce)}", soft_wrap=True)
        if len(mine) > 1:
            console.print(f"  [dim]also: {escape('; '.join(r.case for r in mine[1:]))}[/]")


def github_lines(results: Iterable[Result]) -> list[str]:
    """One line per failed or unknown result, as GitHub's runners read them."""
    kinds = {FAILED: "error", UNKNOWN: "warning"}
    return [
        f"::{kinds[r.outcome]} title=kdk check {r.row}::{r.case}: {r.reason}".replace("\n", "%0A") for r in results if r.outcome in kinds
    ]


def console(*, to_stderr: bool) -> Console:
    """Tables go to standard output, unless that is taken by JSON."""
    return Console(file=sys.stderr if to_stderr else sys.stdout, emoji=False)  # "module:ok" is no emoji
