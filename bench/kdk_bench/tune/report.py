"""What `kdk tune` found, as tables for people and `kdk.tune/1` for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kdk import tuning
from kdk_bench.tune.in_blocks import KNOWN, InBlock
from kdk_bench.tune.search import FAILED, KEPT, TUNED, UNKNOWN, Tuned

SCHEMA = "kdk.tune/1"


def as_json(tuned: Sequence[Tuned], compared: Sequence[InBlock]) -> dict[str, Any]:
    """The report."""
    return {"schema": SCHEMA, "results": [t.as_json() for t in tuned], "blocks": [c.as_json() for c in compared]}


def tables(tuned: Sequence[Tuned], compared: Sequence[InBlock], console: Console) -> None:
    """What each kernel gained; who wins in each block; then what is not known."""
    console.print(_kernels([t for t in tuned if t.outcome in (TUNED, KEPT)]))
    known = [c for c in compared if c.outcome == KNOWN]
    if known:
        console.print(_blocks(known))
    for each in tuned:
        if each.outcome not in (TUNED, KEPT):
            _say(each.outcome, f"{each.heat.op}.{each.heat.direction}[{each.heat.target}]", each.reason, console)
        elif each.no_alone:
            console.print(f"  [dim]{each.heat.op}.{each.heat.direction}: alone unknown: {escape(each.no_alone)}[/]", soft_wrap=True)
    for block in compared:
        if block.outcome != KNOWN:
            _say(block.outcome, f"{block.op} in {block.heat.op} {block.heat.direction}[{block.heat.target}]", block.reason, console)


def _say(outcome: str, what: str, reason: str, console: Console) -> None:
    colour = "red" if outcome == FAILED else "yellow"
    console.print(f"  [{colour}]{outcome}[/] {escape(what)}: {escape(reason)}", soft_wrap=True)


def _kernels(tuned: Sequence[Tuned]) -> Table:
    found = Table(title="launch parameters: what was gained", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("kernel", "case, dtype, chip", "before", "after", "ratio", "parameters", "alone\nx reference", "evidence"):
        found.add_column(column, overflow="fold")
    for t in tuned:
        heat, better = t.heat, t.outcome == TUNED
        refused = sum(bool(cost.why_not) for _, cost in t.tried)
        of = f"\nof {len(t.tried)} tried" + (f", {refused} refused" if refused else "")
        chosen = ", ".join(f"{name}={value}" for name, value in t.parameters.items())
        found.add_row(
            f"{heat.op}\n{heat.direction}",
            escape(f"{heat.case}\n{heat.dtype}, {heat.target}"),
            t.before.text,
            t.after.text if better else "the same",
            f"{t.ratio:.2f}" if t.ratio is not None else "no time",
            (chosen if better else "its own choice") + (of if t.tried else "\nit has none"),
            "" if t.alone is None else f"{t.alone:.2f}",
            t.after.evidence,
        )
    return found


def _blocks(compared: Sequence[InBlock]) -> Table:
    title = "under torch.compile: the block with the kernel over the block without it, modelled"
    found = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("operator", "block", "chip", "with", "without", "ratio", "wins"):
        found.add_column(column, overflow="fold")
    for c in compared:
        assert c.ratio is not None
        cut = ", cut" if c.heat.cut else ""
        block = f"{c.heat.op}, {c.heat.direction} ({c.heat.sizes['tokens']} tokens{cut})"
        row = (c.op, block, c.heat.target, f"{c.kernel:.1f} us", f"{c.reference:.1f} us", f"{c.ratio:.3f}", tuning.winner(c.ratio))
        found.add_row(*map(escape, row))
    return found


def exit_code(tuned: Sequence[Tuned], compared: Sequence[InBlock]) -> int:
    """0: all is known; 1: something failed; 3: something is unknown, or no kernel has a cost."""
    outcomes = {t.outcome for t in tuned} | {c.outcome for c in compared}
    if FAILED in outcomes:
        return 1
    return 3 if UNKNOWN in outcomes or not outcomes & {TUNED, KEPT} else 0
