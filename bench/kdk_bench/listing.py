"""`kdk list`: operators, kernels and evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kdk import tuning
from kdk.backends import TARGETS
from kdk.dispatch import kernel_file
from kdk.registry import OPERATORS
from kdk.selection import IMPLEMENTATIONS
from kdk_bench import evidence


def entries() -> list[dict[str, Any]]:
    """The `ops` of the report `kdk.list/1`."""
    records = evidence.load()
    fields = ("implementation", "direction", "target", "report", "evidence", "environment", "date")
    result = []
    for name, operator in OPERATORS.items():
        op = operator.op
        kernels = {"reference": {"forward": True, "backward": op.backward is not None}}
        for implementation in IMPLEMENTATIONS[1:]:
            has = {d: op.function(d) is not None and kernel_file(op, implementation, d) is not None for d in ("forward", "backward")}
            if any(has.values()):
                kernels[implementation] = has
        mine = [{field: r[field] for field in fields} for r in records if r["op"] == name and evidence.shows_results(r)]
        tuned = [{"target": target, **entry} for target in TARGETS for entry in tuning.table(op, target).entries.values()]
        result.append({"name": name, "summary": op.summary, "implementations": kernels, "evidence": mine, "tuning": tuned})
    return result


def table(listed: Sequence[dict[str, Any]], console: Console) -> None:
    """Operator, what it does, and per implementation the directions it has; the evidence below its column."""
    names = [n for n in IMPLEMENTATIONS if any(n in e["implementations"] for e in listed)]
    shown = Table(title="kdk operators: kernels (promise) and evidence, by chip", title_justify="left")
    shown.add_column("operator", overflow="fold")
    shown.add_column("what it does", max_width=44, overflow="fold")
    for name in names:
        shown.add_column(name, overflow="fold")
    for entry in listed:
        shown.add_row(entry["name"], entry["summary"], *[_cell(entry, name) for name in names])
    console.print(shown)
    console.print("x: the kernel's time over the reference's, and what runs under torch.compile. `kdk tune` records them.")
    console.print("Evidence: declared < simulated < compiled < modelled < measured. `kdk list --json -` has versions and dates.")


def _cell(entry: dict[str, Any], implementation: str) -> str:
    has = entry["implementations"].get(implementation)
    if not has:
        return "-"
    lines = [" + ".join(direction for direction, there in has.items() if there)]
    for target in sorted({r["target"] for r in entry["evidence"] if r["implementation"] == implementation}):
        mine = [r for r in entry["evidence"] if (r["implementation"], r["target"]) == (implementation, target)]
        # An emulator in a compiler's place ran the kernel, on no values: that is no simulated check.
        shown = {r["evidence"] for r in mine if (r["report"], r["evidence"]) != ("compile", "simulated")}
        kinds = sorted(shown, key=evidence.EVIDENCE.index) or ["unknown"]
        lines.append(f"[dim]{target}: {', '.join(kinds)}[/]")
    mine = [t for t in entry["tuning"] if TARGETS[t["target"]] == implementation]
    for target in dict.fromkeys(t["target"] for t in mine):
        lines += [f"[dim]{target}: {text}[/]" for text in _selection([t for t in mine if t["target"] == target])]
    return "\n".join(lines)


def _selection(entries: Sequence[dict[str, Any]]) -> list[str]:
    """What is recorded for one chip, in lines: the kernel's time over the reference's alone, and in the block that decides."""
    lines = []
    alone = [entry["alone"]["ratio"] for entry in entries if "alone" in entry]
    if alone:
        lines.append(f"alone x{min(alone):.2f}" + (f" to x{max(alone):.2f}" if len(alone) > 1 else ""))
    lines += [f"{entry['direction']} {in_block(entry['block'])}" for entry in entries if "block" in entry]
    launched = sum("launch" in entry for entry in entries)
    return [*lines, f"{launched} tuned launches"] if launched else lines


def in_block(part: Mapping[str, Any]) -> str:
    """What a record of a block says."""
    runs = "kernel" if part["winner"] == tuning.KERNEL else "reference"
    return f"the {runs} runs; kernel x{part['ratio']:.2f} in {part['block']}, {part['evidence']} {part['date']}"
