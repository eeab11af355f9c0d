"""Which rows of chips that are not here were asked for, and their tables."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kdk import tuning
from kdk.backends import LANGUAGES, TARGETS
from kdk.cases import Case
from kdk.registry import OPERATORS
from kdk_bench import listing
from kdk_bench.benchmarking.measuring import Heat
from kdk_bench.modelled.rows import COMPILED, FAILED, MODELLED, UNKNOWN, Row, failed, model_of
from kdk_bench.runner import begin
from kdk_bench.workers import DIED, HUNG, each

FIGURES = (MODELLED, COMPILED)


def working_dtypes(name: str, target: str, wanted: Sequence[str]) -> list[str]:
    """Those asked for; else bfloat16 where operator and language have it, else the operator's first."""
    have = [d for d in OPERATORS[name].op.dtypes if d in LANGUAGES[TARGETS[target]].dtypes]
    if wanted:
        return [d for d in OPERATORS[name].op.dtypes if d in wanted]
    return ["bfloat16"] if "bfloat16" in have else have[:1]


def heats(
    names: Sequence[str], directions: Sequence[str], case: str, dtypes: Sequence[str], targets: Sequence[str]
) -> list[tuple[Heat, Case]]:
    """Every operator, direction, case, dtype and chip, at the model's full size."""
    from kdk_bench.benchmarking.measuring import case_named

    return [
        (Heat(name, direction, dtype, target, found.name, dict(found.sizes), False), found)
        for name in names
        for found in case_named(name, case)
        for direction in directions
        if OPERATORS[name].op.function(direction) is not None
        for target in targets
        for dtype in working_dtypes(name, target, dtypes)
    ]


def run(plan: Sequence[tuple[Heat, Case]], directory: str | None, progress: Callable[[], None] = lambda: None) -> list[Row]:
    """The rows of every heat, chips of one language by one model of it."""
    found: dict[int, list[Row]] = {}
    for language in dict.fromkeys(TARGETS[heat.target] for heat, _ in plan):
        mine = [(i, heat, case) for i, (heat, case) in enumerate(plan) if TARGETS[heat.target] == language]
        module = model_of(mine[0][1].target)
        if module is None:
            for i, heat, _ in mine:
                found[i] = [Row(heat, f"kdk {language}", language, UNKNOWN, f"there is no model of the chips of {language}")]
            continue
        limit = getattr(module, "APART", None)
        if limit and len(mine) > 1:
            found |= _apart(mine, directory, limit, progress)
            continue
        with module.Model(directory) as model:
            for i, heat, case in mine:
                found[i] = _rows(model, heat, case)
                progress()
    return [row for i in range(len(plan)) for row in found[i]]


def _rows(model: Any, heat: Heat, case: Case) -> list[Row]:
    try:
        return [_with_selection(row) for row in model.rows(heat, case)]
    except Exception as error:  # of the operator's own code, which runs on tensors without data here
        language = TARGETS[heat.target]
        return [failed(heat, f"kdk {language}", language, error)]


def _alone(directory: str | None, task: tuple[int, Heat, Case]) -> list[Row]:
    """In a process of its own."""
    import kdk.ops  # noqa: F401

    _, heat, case = task
    module = model_of(heat.target)
    assert module is not None
    with module.Model(directory) as model:
        return _rows(model, heat, case)


def _apart(
    mine: Sequence[tuple[int, Heat, Case]], directory: str | None, limit: float, progress: Callable[[], None]
) -> dict[int, list[Row]]:
    """Every heat in a process of its own, as many side by side as there are cores: what does not end holds nothing up."""
    found = {}
    jobs = min(os.cpu_count() or 1, len(mine))
    for (i, heat, _), rows in each(
        functools.partial(begin, directory), functools.partial(_alone, directory), list(mine), jobs=jobs, limit=limit
    ):
        if rows in (DIED, HUNG):
            reason = "the process of this row died" if rows == DIED else f"not traced and modelled within {limit:.0f} s"
            rows = [Row(heat, f"kdk {TARGETS[heat.target]}", TARGETS[heat.target], UNKNOWN, reason)]
        found[i] = rows
        progress()
    return found


def _with_selection(row: Row) -> Row:
    """What torch.compile runs in a kernel's place where a block that it loses is recorded: its ratio is shown all the same."""
    heat = row.heat
    if not row.implementation or heat.op not in OPERATORS:
        return row
    part = tuning.table(OPERATORS[heat.op].op, heat.target).part("block", heat.direction, heat.dtype, heat.sizes)
    return replace(row, caveats=(*row.caveats, f"under torch.compile: {listing.in_block(part)}")) if part else row


def tables(rows: Sequence[Row], console: Console) -> None:
    """A table for each heat; then who has no figures, and what the figures leave out."""
    for key, mine in _by_heat(rows):
        module = model_of(key.target)
        shown = [row for row in mine if row.outcome in FIGURES]
        if module is not None and shown:
            console.print(_table(key, shown, module))
        else:
            console.print(escape(_title(key, "no figures")))
        for row in mine:
            if row.outcome not in FIGURES:
                colour = "red" if row.outcome == FAILED else "yellow"
                console.print(f"  [{colour}]{row.outcome}[/] {escape(row.contender)}: {escape(row.reason)}", soft_wrap=True)
            for caveat in row.caveats:
                console.print(f"  [dim]{escape(row.contender)}: {escape(caveat)}[/]", soft_wrap=True)


def _by_heat(rows: Sequence[Row]) -> Iterator[tuple[Heat, list[Row]]]:
    seen: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        h = row.heat
        seen.setdefault((h.op, h.direction, h.case, h.dtype, h.target), []).append(row)
    for mine in seen.values():
        yield mine[0].heat, mine


def _title(heat: Heat, what: str) -> str:
    sizes = " ".join(f"{letter}={size}" for letter, size in heat.sizes.items())
    cut = ", cut to what the profiler bears" if heat.cut else ""
    return f"{heat.op} {heat.direction}, {heat.case} ({sizes}{cut}), {heat.dtype}, {heat.target}: {what}"


def _table(heat: Heat, rows: Sequence[Row], module: Any) -> Table:
    evidence = rows[0].outcome
    title = _title(heat, f"{evidence}{module.summary(rows[0])}")
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("contender", overflow="fold")
    for column in module.COLUMNS:
        table.add_column(column, justify="right", overflow="fold")
    for row in sorted(rows, key=lambda r: (r.us is None, r.us)):
        table.add_row(escape(row.contender), *[escape(cell) for cell in module.cells(row)])
    return table


def exit_code(rows: Sequence[Row]) -> int:
    """0: kdk's own have figures; 1: one failed; 3: something could not be found out, or none of kdk's own has figures."""
    if any(row.outcome == FAILED for row in rows):
        return 1
    known = any(row.outcome in FIGURES and row.implementation for row in rows)
    return 0 if known and not any(row.outcome == UNKNOWN for row in rows) else 3
