"""Compilations as tables for people, JSON for programs, and annotations for GitHub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kdk.backends import LANGUAGES
from kdk_bench.compiling.rows import Result

COMPILED, REFUSED, FAILED, UNKNOWN = "compiled", "refused", "failed", "unknown"


def as_json(results: Iterable[Result]) -> dict[str, Any]:
    """The report `kdk.compile/1`."""
    return {"schema": "kdk.compile/1", "results": [r.as_json() for r in results]}


def exit_code(results: Sequence[Result]) -> int:
    """0 holds, 1 a budget is broken, a kernel raised, or a compiler refused what `supports` takes; 3 nothing of that, and
    something could not be determined."""
    if not all(r.holds for r in results):
        return 1
    return 3 if not results or any(r.outcome == UNKNOWN for r in results) else 0


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    if result.outcome == COMPILED:
        brief = LANGUAGES[result.row.implementation].module("compile").brief(result.resources)
        return f"[green]{escape(brief)}[/]" if brief else "[green]compiled[/]"
    colour = "red" if not result.holds else "yellow"
    return f"[{colour}]{result.outcome}[/]"


def tables(results: Sequence[Result], console: Console) -> None:
    """A table for each language, operator x dtype x chip; then what does not hold, and why the others were refused."""
    for name in dict.fromkeys(r.row.implementation for r in results):
        mine = [r for r in results if r.row.implementation == name]
        evidence = "/".join(dict.fromkeys(r.evidence for r in mine))
        legend = LANGUAGES[name].module("compile").BRIEF
        table = Table(title=f"kdk compile, {name} ({evidence}): {legend}", title_justify="left")
        chips = list(dict.fromkeys(r.row.target for r in mine))
        for column in ("operator", "dtype", *chips):
            table.add_column(column, overflow="fold")
        cells = {(r.row.op, r.row.direction, r.row.dtype, r.row.target): r for r in mine}
        for op, direction, dtype in dict.fromkeys((r.row.op, r.row.direction, r.row.dtype) for r in mine):
            table.add_row(f"{op}.{direction}", dtype, *[_cell(cells.get((op, direction, dtype, chip))) for chip in chips])
        console.print(table)
    _reasons([r for r in results if not r.holds], "red", console)
    _reasons([r for r in results if r.holds and r.outcome != COMPILED], "yellow", console)


def _reasons(results: Iterable[Result], colour: str, console: Console) -> None:
    """Every reason once, with where it applies."""
    found: dict[tuple[str, str], list[Result]] = {}
    for r in results:
        found.setdefault((r.outcome, f"{r.row.implementation}: {r.reason}"), []).append(r)
    for (outcome, reason), where in found.items():
        rows = dict.fromkeys(f"{r.row.op}.{r.row.direction} {r.row.dtype} {r.row.target}" for r in where)
        names = list(rows) if len(rows) <= 3 else list(dict.fromkeys(f"{r.row.op}.{r.row.direction}" for r in where))
        console.print(f"[{colour}]{outcome}[/] {escape(reason)} [dim]({escape(', '.join(names))})[/]", soft_wrap=True)


def github_lines(results: Iterable[Result]) -> list[str]:
    """One line for each result that does not hold or is not known, as GitHub's runners read them."""
    lines = []
    for r in results:
        if not r.holds or r.outcome == UNKNOWN:
            kind = "warning" if r.holds else "error"
            lines.append(f"::{kind} title=kdk compile {r.row}::{r.case}: {r.reason}".replace("\n", "%0A"))
    return lines
