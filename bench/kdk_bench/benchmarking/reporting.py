"""Entries of a race as a table for people and `kdk.bench/1` for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kdk_bench.benchmarking.measuring import MEASURED, WRONG, Entry
from kdk_bench.records import environment, today

SCHEMA = "kdk.bench/1"
BROKEN = (WRONG, "failed")


def as_json(entries: Iterable[Entry], modelled: Iterable[Any] = ()) -> dict[str, Any]:
    """The report `kdk.bench/1`: one result per contender. Seconds, bytes, bytes/s, FLOP/s; null is unknown.

    modelled: rows of `kdk_bench.modelled`, which go in as they say of themselves."""
    results = []
    for e in entries:
        heat = e.heat
        results.append(
            {
                "op": heat.op,
                "direction": heat.direction,
                "case": heat.case,
                "sizes": dict(heat.sizes),
                "cut": heat.cut,
                "operators": list(heat.operators),
                "dtype": heat.dtype,
                "target": heat.target,
                "contender": e.contender,
                "implementation": e.implementation,
                "outcome": e.outcome,
                "reason": e.reason,
                "cold_seconds": e.cold,
                "seconds": dict(e.times),
                "samples": list(e.samples),
                "ratio": e.ratio,
                "peak_memory": e.peak_memory,
                **{name: e.rates.get(name) for name in RATES},
                "evidence": "measured" if e.outcome == MEASURED else "",
                "environment": environment(),
                "date": today(),
            }
        )
    return {"schema": SCHEMA, "results": [*results, *[row.as_json() for row in modelled]]}


COLUMNS = ("contender", "p50", "p95\np99", "ratio to eager\n95 % interval", "bandwidth\nFLOP rate", "peak memory\nfirst call")
RATES = ("bytes", "flops", "bandwidth", "flop_rate", "share_of_bandwidth", "share_of_flop_rate", "cost_per_million_calls")


def seconds(value: float | None) -> str:
    """1.23 us, 4.56 ms, 7.8 s."""
    if value is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def amount(value: float | None, unit: str) -> str:
    """1.23 GB/s: SI prefixes."""
    if value is None:
        return "unknown"
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _ratio(e: Entry) -> str:
    if not e.ratio:
        return ""
    return f"{e.ratio['value']:.2f}\n{e.ratio['low']:.2f}-{e.ratio['high']:.2f}"


def table(entries: Sequence[Entry], console: Console) -> None:
    """One table per race, the fastest first; then who was not timed, and why."""
    for heat in dict.fromkeys((e.heat.op, e.heat.direction, e.heat.case, e.heat.dtype, e.heat.target) for e in entries):
        mine = [e for e in entries if (e.heat.op, e.heat.direction, e.heat.case, e.heat.dtype, e.heat.target) == heat]
        _race(mine, console)


def _race(entries: Sequence[Entry], console: Console) -> None:
    heat = entries[0].heat
    sizes = " ".join(f"{letter}={size}" for letter, size in heat.sizes.items())
    cut = ", cut to what can be checked here" if heat.cut else ""
    title = f"{heat.op} {heat.direction}, {heat.case} ({sizes}{cut}), {heat.dtype}, {heat.target}: measured"
    found = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        found.add_column(column, justify="left" if column == "contender" else "right", overflow="fold")
    timed = sorted((e for e in entries if e.outcome == MEASURED), key=lambda e: e.times["p50"] or 0.0)
    for e in timed:
        spread = e.times.get("spread")
        found.add_row(
            escape(e.contender),
            f"{seconds(e.times['p50'])}\n{'spread ' + format(spread, '.0%') if spread is not None else ''}",
            f"{seconds(e.times.get('p95'))}\n{seconds(e.times.get('p99'))}",
            _ratio(e),
            f"{_rate(e, 'bandwidth', 'B/s')}\n{_rate(e, 'flop_rate', 'FLOP/s')}",
            f"{amount(e.peak_memory, 'B')}\n{seconds(e.cold)}",
        )
    console.print(found)
    for e in entries:
        if e.outcome != MEASURED:
            colour = "red" if e.outcome in BROKEN else "yellow"
            console.print(f"  [{colour}]{e.outcome}[/] {escape(e.contender)}: {escape(e.reason)}", soft_wrap=True)


def _rate(e: Entry, name: str, unit: str) -> str:
    share = e.rates.get(f"share_of_{name}")
    return amount(e.rates.get(name), unit) + (f" ({share:.0%})" if share is not None else "")


def exit_code(entries: Sequence[Entry]) -> int:
    """0: kdk's own are right and timed; 1: one is wrong or failed; 3: none of them could be timed."""
    own = [e for e in entries if e.implementation]
    if any(e.outcome in BROKEN for e in own):
        return 1
    return 0 if any(e.outcome == MEASURED for e in own) else 3

