"""From a capture and the platforms' support to the report `kdk.audit/1`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdk_bench.audit import fills, matching, probe, sources, structural
from kdk_bench.audit import findings as of
from kdk_bench.audit.findings import Finding, Op
from kdk_bench.audit.support import Platform
from kdk_bench.audit.trace import Capture, groups
from kdk_bench.records import environment, today

SCHEMA = "kdk.audit/1"


def report(capture: Capture, platforms: Sequence[Platform], model: str) -> dict[str, Any]:
    """Everything that is known, as JSON: capture, ops, findings, environment, date."""
    gathered = groups(capture.steps)
    hits = matching.find(capture, grad=not capture.forward_only) if capture.steps else []
    sized = capture
    if capture.real is not None:
        # Operators of both runs; figures of the real size.
        sized = capture.real
        real = groups(sized.steps)
        names = {(g.name, g.phase) for g in real}
        gathered = [*real, *(g for g in gathered if (g.name, g.phase) not in names)]
        hits = matching.find(sized, grad=not capture.forward_only, known=hits) if hits else hits
    ops = of.operators(gathered, platforms)
    found: list[Finding] = []
    filled = {platform.name: fills.fills(platform.name) for platform in platforms}
    for platform in platforms:
        found += of.of_operators(ops, [platform], filled[platform.name])
        found += structural.of_chains(hits, sized, [platform], filled[platform.name])
    found += structural.of_runs(hits, sized, platforms) + structural.of_loops(sized, platforms, filled)
    found += of.of_data(ops, platforms)
    found += of.of_graph_break(capture)
    found += of.of_shapes(capture, platforms) if capture.steps else []
    memory, too_large = of.of_memory(sized, platforms)
    found += [*too_large, *of.of_precision(ops, platforms)]
    found += sources.of_code(capture, platforms) + sources.of_libraries(capture, platforms) + sources.of_blind_spots(capture)
    return {
        "schema": SCHEMA,
        "model": model,
        "capture": {
            "how": capture.how,
            "steps": len(capture.steps),
            "train": not capture.forward_only,
            "seconds": [round(s.seconds, 4) for s in capture.steps],
            "calls_per_step": max((len(s.calls) for s in capture.steps), default=0),
            "memory": memory,
            "chains": structural.modules(hits),
            "graph_breaks": capture.graph_breaks,
            "notes": capture.notes,
            "error": capture.error,
        },
        "platforms": [described(p) for p in platforms],
        "ops": [as_json(op) for op in ops],
        "findings": [f.as_json() for f in of.ranked(found)],
        "environment": environment(),
        "date": today(),
    }


def described(platform: Platform) -> dict[str, Any]:
    tables = [{"source": t["source"], "date": t["date"]} for t in platform.tables]
    chip = platform.chip
    return {
        "name": platform.name,
        "chip": chip.name,
        "hbm": chip.hbm,
        "chip_source": chip.source,
        "tables": tables,
        "measured": len(platform.measured),
        "missing_operators": platform.describes["does"],
        "notes": platform.notes,
    }


def as_json(op: Op) -> dict[str, Any]:
    group = op.group
    arguments = probe.arguments(group.example) if group.example else None
    return {
        "op": group.op,
        "overload": group.overload,
        "phase": group.phase,
        "count": group.count,
        "tensors": [str(m) for m in group.metas],
        "arguments": arguments,
        "bytes": group.bytes,
        "flops": group.flops,
        "cpu_seconds": round(group.seconds, 7),
        "modules": group.modules[:8],
        "lines": group.lines[:4],
        "functions": [f for f in group.functions[:4] if f],
        "support": {name: support.as_json() for name, support in op.support.items()},
    }


def compare(new: dict[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Mark the findings that a baseline has not, and name those that are gone, on the platforms of the new report."""
    before = {f["id"] for f in old["findings"]}
    for finding in new["findings"]:
        finding["new"] = finding["id"] not in before
    now = {f["id"] for f in new["findings"]}
    asked, known = ([p["name"] for p in r["platforms"]] for r in (new, old))
    if old["model"] != new["model"] or not set(asked) <= set(known):
        says = f"the baseline is of {old['model']} on {', '.join(known)}: what it does not know is new"
        new["capture"]["notes"].append(says)
    return sorted(f["id"] for f in old["findings"] if f["id"] not in now and f["platform"] in ("", *asked))


def in_bytes(number: float) -> str:
    """Two digits with a unit."""
    unit = next((unit for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if number >= size), "B")
    return f"{two_digits(number / {'GB': 1e9, 'MB': 1e6, 'kB': 1e3, 'B': 1}[unit])} {unit}"


def two_digits(number: float) -> str:
    """ "320" and "0.012"; no exponent in front of a unit."""
    return f"{float(f'{number:.2g}'):g}"


def verdict(report: Mapping[str, Any], platform: Mapping[str, Any]) -> str:
    """One platform's line: operators / code lines / libraries / compilations / memory."""
    name = platform["name"]
    mine = [f for f in report["findings"] if f["platform"] in (name, "")]
    names: dict[str, set[str]] = {}
    for op in report["ops"]:
        names.setdefault(op["support"][name]["status"], set()).add(f"{op['op']}.{op['overload']}")
    words = {"error": "missing", "host": "on the host", "unknown": "unknown", "conditional": "conditional"}
    seen = len({n for group in names.values() for n in group})
    parts = [f"{len(names[s])} {word}" for s, word in words.items() if s in names]
    operators = f"operators: {', '.join(parts) or 'none missing'}, of {seen}" if seen else "operators: unknown, nothing was captured"
    code = sum(f["kind"] == "code" for f in mine) if name != "cuda" else 0
    libraries = sum(f["kind"] == "library" for f in mine)
    shapes = [f["calls_per_step"] for f in mine if f["kind"] == "shapes"]
    compilations = f"{shapes[0]} compilation{'s' * (shapes[0] != 1)}" if shapes else "no shape limits"
    total = report["capture"]["memory"]["total"]
    memory = f"{in_bytes(total)} of {platform['hbm'] / 1e9:.0f} GB"
    return f"{operators} / {code} code line{'s' * (code != 1)} / {libraries} libraries / {compilations} / {memory}"
