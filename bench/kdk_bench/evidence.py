"""The store of evidence that ships with kdk: what was shown for an operator, by whom, on what, and when."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kdk.backends import LANGUAGES
from kdk.errors import UsageError
from kdk_bench.records import EVIDENCE

STORE = Path(__file__).parent / "evidence" / "evidence.json"
SCHEMA = "kdk.evidence/1"
FIELDS = ("op", "implementation", "direction", "target", "evidence", "environment", "date")
KEY = ("op", "implementation", "direction", "target", "evidence")


def load(store: Path = STORE) -> list[dict[str, Any]]:
    """Every record; none when nothing was ever added."""
    if not store.exists():
        return []
    return list(json.loads(store.read_text())["records"])


HOLDS = {"kdk.check/1": "passed", "kdk.compile/1": "compiled"}
"""Report -> the outcome that is evidence."""


def from_bench(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Records of the modelled results of a `kdk.bench/1` report that are a kernel's: a line of operator, direction, implementation
    and target counts when none of it failed, with the ratios of its worst case and dtype, and which they are.

    Blocks are no operators, and a measured time is no evidence of being right: neither is taken."""
    lines: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for result in report["results"]:
        if result["implementation"] in LANGUAGES and result["outcome"] in ("modelled", "failed"):
            lines.setdefault(tuple(result[name] for name in ("op", "implementation", "direction", "target")), []).append(result)
    records = []
    for results in lines.values():
        if all(r["outcome"] == "modelled" for r in results):
            worst = max(results, key=lambda r: max(r["ratios"].values()))
            records.append({name: worst[name] for name in (*FIELDS, "ratios", "case", "dtype")})
    return records


def from_report(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Records of a report. Of `kdk.check/1` and `kdk.compile/1` a line of operator, direction, implementation and target counts when
    it has no failed or unknown result, nothing that does not hold, and at least one that passed or was compiled."""
    if report.get("schema") == "kdk.bench/1":
        return from_bench(report)
    if report.get("schema") not in HOLDS:
        limit = "kdk.check/1, kdk.compile/1 or kdk.bench/1, as --json of `kdk check`, `kdk compile` and `kdk bench` writes them"
        raise UsageError("KDK-REPORT", "not a report that carries evidence", value=report.get("schema"), limit=limit)
    lines: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for result in report["results"]:
        lines.setdefault(tuple(result[name] for name in KEY), []).append(result)
    records = []
    for results in lines.values():
        outcomes = {r["outcome"] for r in results}
        broken = outcomes & {"failed", "unknown"} or not all(r.get("holds", True) for r in results)
        if HOLDS[report["schema"]] in outcomes and not broken:
            records.append({name: results[0][name] for name in FIELDS})
    return records


def merge(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record per operator, implementation, direction, target and kind of evidence: the latest."""
    merged: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in [*old, *new]:
        if record["evidence"] not in EVIDENCE:
            raise UsageError("KDK-EVIDENCE", "unknown kind of evidence", value=record["evidence"], limit=" < ".join(EVIDENCE))
        key = tuple(record[name] for name in KEY)
        if key not in merged or merged[key]["date"] <= record["date"]:
            merged[key] = record
    return sorted(merged.values(), key=lambda r: tuple(r[name] for name in KEY))


def add(report: Mapping[str, Any], store: Path = STORE) -> int:
    """Merge a report into the store; the number of its records."""
    records = from_report(report)
    store.parent.mkdir(exist_ok=True)
    store.write_text(json.dumps({"schema": SCHEMA, "records": merge(load(store), records)}, indent=1) + "\n")
    return len(records)
