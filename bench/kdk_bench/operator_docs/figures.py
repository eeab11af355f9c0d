"""Tables of figures, one for each kind of evidence: figures of two kinds never share a column."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kdk.backends import LANGUAGES
from kdk.op import Op
from kdk_bench.benchmarking.reporting import seconds
from kdk_bench.evidence import EVIDENCE, Record
from kdk_bench.operator_docs.facts import implementations, in_order


@dataclass(frozen=True)
class Table:
    """title: the kind of evidence. rows: cells as they are printed."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _by_kind(records: Iterable[Record]) -> list[tuple[str, list[Record]]]:
    records = in_order(records)
    found = [(kind, [r for r in records if r["evidence"] == kind]) for kind in EVIDENCE]
    return [(kind, mine) for kind, mine in found if mine]


def _what(record: Record) -> tuple[str, str, str]:
    return record["implementation"], record["direction"], record["target"]


def _worst(record: Record, dtype: str) -> str:
    language, found = LANGUAGES.get(record["implementation"]), record["dtypes"].get(dtype)
    if found is None:
        return "refused" if language is not None and dtype not in language.dtypes else "unknown"
    return f"{found['error_ratio']:.2f} ({found['results']})"


def accuracy(op: Op, records: Iterable[Record]) -> list[Table]:
    """The worst error of each dtype as a share of its limit, and over how many results."""
    tables = []
    for kind, mine in _by_kind(r for r in records if r["report"] == "check"):
        rows = []
        for r in mine:
            rows.append((*_what(r), "at most 1", *[_worst(r, d) for d in op.dtypes], r["date"]))
        columns = ("implementation", "direction", "target", "promise", *op.dtypes, "date")
        tables.append(Table(kind, columns, tuple(rows)))
    return tables


def resources(records: Iterable[Record]) -> list[Table]:
    """What a kernel uses at a model's shape, by its target's compiler or by the emulator."""
    tables = []
    for kind, mine in _by_kind(r for r in records if r["report"] == "compile"):
        rows = []
        for r in mine:
            brief = LANGUAGES[r["implementation"]].module("compile").brief
            rows += [(*_what(r), dtype, f["case"], brief(f["resources"]), r["date"]) for dtype, f in r["dtypes"].items()]
        tables.append(Table(kind, ("implementation", "direction", "target", "dtype", "shapes of", "uses", "date"), tuple(rows)))
    return tables


def legend(tables: Iterable[Table]) -> list[tuple[str, str]]:
    """(language, what its resources mean) of the languages that the tables have."""
    named = dict.fromkeys(row[0] for table in tables for row in table.rows)
    return [(name, LANGUAGES[name].module("compile").BRIEF) for name in named]


def alone(records: Iterable[Record]) -> list[Table]:
    """Time of the operator by itself, and its ratios."""
    return _speed("implementation", (r for r in records if r["report"] == "bench"))


def in_blocks(op: Op, every: Iterable[Record]) -> list[Table]:
    """Time of the blocks of models that the operator runs in."""
    return _speed("block", (r for r in every if op.name in r.get("operators", ())))


def _speed(first: str, records: Iterable[Record]) -> list[Table]:
    tables = []
    for kind, mine in _by_kind(records):
        ratios = list(dict.fromkeys(to for r in mine for to in r["ratios"]))
        rows = []
        for r in mine:
            name = r["implementation"] if first == "implementation" else f"{r['op']}, {r['implementation']}"
            times = [f"{r['ratios'][to]:.2f}" if to in r["ratios"] else "unknown" for to in ratios]
            rows.append((name, r["direction"], r["target"], r["case"], r["dtype"], seconds(r["seconds"]), *times, r["date"]))
        columns = (first, "direction", "target", "shapes of", "dtype", "time", *[f"x {to}" for to in ratios], "date")
        tables.append(Table(kind, columns, tuple(rows)))
    return tables


def unknown(op: Op, records: Iterable[Record], report: str) -> list[str]:
    """The implementations and directions of which there is no record of this kind of report: those with a chip, and of a check
    those in plain torch too."""
    have = {(r["implementation"], r["direction"]) for r in records if r["report"] == report}
    asked: list[Any] = [pair for pair in implementations(op) if report == "check" or pair[0] in LANGUAGES]
    return [f"{implementation} {direction}" for implementation, direction in asked if (implementation, direction) not in have]
