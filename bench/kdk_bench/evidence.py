"""The store of evidence that ships with kdk: what was shown for an operator, by whom, on what, and when."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdk.backends import LANGUAGES
from kdk.errors import UsageError
from kdk_bench.records import EVIDENCE

STORE = Path(__file__).parent / "evidence" / "evidence.json"
SCHEMA = "kdk.evidence/2"
KEY = ("op", "implementation", "direction", "target", "report", "evidence")
FIELDS = (*KEY, "environment", "date")
"""Of every record. Beside them stand the figures: of a check and a compilation `dtypes`, of a bench `ratios` and what they are of."""
REPORTS = {"kdk.check/1": "check", "kdk.compile/1": "compile", "kdk.bench/1": "bench"}
Record = dict[str, Any]
Results = Sequence[Mapping[str, Any]]


def load(store: Path = STORE) -> list[Record]:
    """Every record; none when nothing was ever added."""
    if not store.exists():
        return []
    return list(json.loads(store.read_text())["records"])


def shows_results(record: Mapping[str, Any]) -> bool:
    """Whether a record says that results are right. A time does not; that a kernel could be modelled says that it compiles."""
    return (record["report"], record["evidence"]) != ("bench", "measured") and "operators" not in record


def _check(results: Results) -> Record | None:
    """Per dtype the worst error as a share of its limit , over how many results."""
    if any(r["outcome"] in ("failed", "unknown") for r in results):
        return None
    dtypes: dict[str, Any] = {}
    for r in results:
        if r["outcome"] == "passed":
            found = dtypes.setdefault(r["dtype"], {"error_ratio": 0.0, "results": 0})
            ratio = r.get("error_ratio")
            dtypes[r["dtype"]] = {"error_ratio": max(found["error_ratio"], round(ratio or 0.0, 4)), "results": found["results"] + 1}
    return {"dtypes": dtypes} if dtypes else None


def _compile(results: Results) -> Record | None:
    """Per dtype what the kernel uses, at which model's shape."""
    if any(r["outcome"] in ("failed", "unknown") or not r["holds"] for r in results):
        return None
    dtypes = {r["dtype"]: {"case": r["case"], "resources": _worst(r["resources"])} for r in results if r["outcome"] == "compiled"}
    return {"dtypes": dtypes} if dtypes else None


def _worst(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Of the launches together; each by itself would make the store many times larger."""
    return {name: value for name, value in resources.items() if name != "launches"}


def _bench(results: Results) -> Record | None:
    """The ratios of the worst case and dtype, and which they are; the time beside them."""
    known = [r for r in results if r["outcome"] in ("modelled", "measured")]
    if len(known) < len(results) or not known:
        return None
    worst = max(known, key=lambda r: max(_ratios(r).values(), default=0.0))
    seconds = worst["seconds"].get("p50") if worst["outcome"] == "measured" else worst.get("modelled_seconds")
    found = {"ratios": _ratios(worst), "case": worst["case"], "dtype": worst["dtype"], "seconds": seconds}
    return {**found, "operators": list(worst["operators"])} if worst.get("operators") else found


def _ratios(result: Mapping[str, Any]) -> dict[str, float]:
    if result["outcome"] == "measured":
        return {result["ratio"]["to"]: result["ratio"]["value"]} if result.get("ratio") else {}
    return {to: value for to, value in result["ratios"].items() if value is not None}


JUDGES = {"check": _check, "compile": _compile, "bench": _bench}


def _key(result: Mapping[str, Any], report: str) -> tuple[str, ...] | None:
    """Of which record a result is a part; of a bench only what is kdk's: a kernel, or a block that operators run in."""
    implementation = result["implementation"]
    if report == "bench":
        if result.get("operators") and implementation:
            implementation = result["contender"]
        elif implementation not in LANGUAGES or result["outcome"] not in ("modelled", "measured", "failed", "wrong"):
            return None
    return (result["op"], implementation, result["direction"], result["target"], report)


def _lines(report: Mapping[str, Any]) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    """Results by operator, implementation, direction, target and kind of report."""
    name = REPORTS.get(report.get("schema", ""))
    if name is None:
        limit = "kdk.check/1, kdk.compile/1 or kdk.bench/1, as --json of `kdk check`, `kdk compile` and `kdk bench` writes them"
        raise UsageError("KDK-REPORT", "not a report that carries evidence", value=report.get("schema"), limit=limit)
    lines: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for result in report["results"]:
        key = _key(result, name)
        if key is not None:
            lines.setdefault(key, []).append(result)
    return lines


def _kind(results: Results) -> str:
    return str(next((r["evidence"] for r in results if r["evidence"]), ""))


def from_report(report: Mapping[str, Any]) -> list[Record]:
    """Records of the lines that hold: of a check or a compilation one that has no failed or unknown result, and at least one that
    passed or was compiled; of a bench one that has figures and nothing failed."""
    records = []
    for key, results in _lines(report).items():
        figures = JUDGES[key[-1]](results)
        if figures is not None:
            common = (*key, _kind(results), results[-1]["environment"], max(r["date"] for r in results))
            records.append({**dict(zip(FIELDS, common, strict=True)), **figures})
    return records


def _broken(report: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """The lines that have a failed result, each with its kind of evidence: "" where nothing says it."""

    def fails(r: Mapping[str, Any]) -> bool:
        return r["outcome"] in ("failed", "wrong") or not r.get("holds", True)

    return {(*key, _kind(results)) for key, results in _lines(report).items() if any(map(fails, results))}


def merge(old: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """One record per operator, implementation, direction, target, report and kind of evidence: the latest."""
    merged: dict[tuple[str, ...], Record] = {}
    for record in [*old, *new]:
        if record["evidence"] not in EVIDENCE:
            raise UsageError("KDK-EVIDENCE", "unknown kind of evidence", value=record["evidence"], limit=" < ".join(EVIDENCE))
        key = tuple(record[name] for name in KEY)
        if key not in merged or merged[key]["date"] <= record["date"]:
            merged[key] = record
    return sorted(merged.values(), key=lambda r: tuple(r[name] for name in KEY))


def add(report: Mapping[str, Any], store: Path = STORE) -> int:
    """Merge a report into the store; the number of its records. What the report shows to fail is taken out."""
    records, broken = from_report(report), _broken(report)
    old = [r for r in load(store) if not {tuple(r[name] for name in KEY), (*(r[name] for name in KEY[:-1]), "")} & broken]
    store.parent.mkdir(exist_ok=True)
    text = ",\n".join(json.dumps(record) for record in merge(old, records))
    store.write_text(f'{{"schema": "{SCHEMA}", "records": [\n{text}\n]}}\n')
    return len(records)
