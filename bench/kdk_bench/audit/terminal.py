"""The verdict and the ten findings that matter most, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kdk_bench.audit.audit import two_digits, verdict

TOP = 10


def show(report: Mapping[str, Any], console: Console, gone: Sequence[str] = ()) -> None:
    """First the verdict per platform, then the findings."""
    for platform in report["platforms"]:
        console.print(
            f"[bold]{platform['name']}[/] ({platform['chip']}) {escape(verdict(report, platform))}", soft_wrap=True, highlight=False
        )
    capture = report["capture"]
    shown = "forward, backward, optimiser" if capture["train"] else "forward only"
    console.print(
        f"[dim]{escape(report['model'])}: {capture['how']}, {shown}, {capture['calls_per_step']} operator calls a step[/]", soft_wrap=True
    )
    if capture["error"]:
        console.print(f"[red]the capture ended early:[/] {escape(capture['error'])}", soft_wrap=True)
    for platform in report["platforms"]:
        for note in platform["notes"]:
            console.print(f"[dim]{platform['name']}: {escape(note)}[/]", soft_wrap=True)
    for note in capture["notes"]:
        console.print(f"[dim]{escape(note)}[/]", soft_wrap=True)
    if report["findings"]:
        console.print(_table(report["findings"]))
    rest = len(grouped(report["findings"])) - TOP
    if rest > 0:
        console.print(f"[dim]and {rest} more: --json or --html has them all, --explain ID one of them[/]")
    if gone:
        console.print(f"[green]gone since the baseline:[/] {', '.join(gone)}", soft_wrap=True)


def _table(found: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(show_lines=True, title="findings: blocking first, then time saved per step (modelled)", title_justify="left")
    for column in ("finding", "what, where, filled by", "calls, saves"):
        table.add_column(column, overflow="fold", no_wrap=column == "finding")
    for group in grouped(found)[:TOP]:
        f = max(group, key=lambda g: g["cost"].get("now", 0.0) - g["cost"].get("after", 0.0))
        mark = "[red]" if f["blocking"] else ""
        named = " ".join(filter(None, (f"{mark}{f['kind']}{'[/]' if mark else ''}", escape(f["op"] or f["pattern"]))))
        what = f"{named}: {escape(f['says'])}"
        where = " ".join(filter(None, (f["module"], f["line"])))
        platforms = ", ".join(filter(None, (g["platform"] for g in group))) or "everywhere"
        figures = filter(None, (str(f["calls_per_step"] or ""), _saved(f)))
        middle = filter(None, (what, f"[dim]{escape(where)}[/]" if where else "", f"[green]{escape(_filled(f))}[/]" if _filled(f) else ""))
        table.add_row(f"{f['id']}\n[dim]{platforms}[/]", "\n".join(middle), "\n".join(figures))
    return table


def grouped(found: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The same finding on several platforms is one row; JSON has them apart."""
    rows: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for f in found:
        rows.setdefault((f["kind"], f["op"], f["pattern"], f["module"], f["line"], f["blocking"]), []).append(f)
    return list(rows.values())


def _saved(f: Mapping[str, Any]) -> str:
    cost = f["cost"]
    if not cost:
        return "unknown" if f["kind"] in ("missing",) else ""
    return f"{time(cost['now'] - cost['after'])}\n[dim]{cost['evidence']}[/]"


def time(seconds: float) -> str:
    """Two digits with a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{two_digits(seconds / size)} {unit}"
    return f"{two_digits(seconds * 1e6)} us"


def _filled(f: Mapping[str, Any]) -> str:
    filled = f["filled_by"]
    return f"{filled['what']}: {filled['name']}".rstrip(": ") if filled else ""


def explain(report: Mapping[str, Any], identity: str, console: Console) -> bool:
    """Everything about one finding; False when there is none of this id."""
    for f in report["findings"]:
        if f["id"] == identity:
            for key, value in f.items():
                if value not in ("", {}, [], None):
                    console.print(f"[bold]{key}[/]: {escape(str(value))}", soft_wrap=True)
            _where(report, f, console)
            return True
    return False


def _where(report: Mapping[str, Any], f: Mapping[str, Any], console: Console) -> None:
    for op in report["ops"]:
        name = op["op"] if op["overload"] == "default" else f"{op['op']}.{op['overload']}"
        if f["op"] == name:
            support = op["support"].get(f["platform"], {})
            says = f"{support['status']}: {support['condition']}" if support else ""
            console.print(f"  {op['phase']} x{op['count']} {escape(', '.join(op['tensors']))} {escape(says)}", soft_wrap=True)
            console.print(f"    [dim]{escape(', '.join(op['modules'][:3]))} {escape(', '.join(op['lines'][:2]))}[/]", soft_wrap=True)


def github(report: Mapping[str, Any], failing: Sequence[Mapping[str, Any]]) -> list[str]:
    """Annotations: an error per failing finding, a warning for the other blocking ones."""
    ids = {f["id"] for f in failing}
    lines = []
    for f in report["findings"]:
        if f["id"] in ids or f["blocking"]:
            level = "error" if f["id"] in ids else "warning"
            file, _, number = f["line"].rpartition(":")
            place = f"file={file},line={number}," if file and number.isdigit() else ""
            text = f"{f['kind']} {f['op'] or f['pattern']} {f['says']} ({f['id']})".replace("\n", "%0A")
            lines.append(f"::{level} {place}title=kdk audit {f['platform']}::{text}")
    return lines
