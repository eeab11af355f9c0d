"""The report of a device check: JSON for programs, a page and a summary for people, in one folder."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2

from kdk_bench import report as checks
from kdk_bench.benchmarking import page, plots, reporting
from kdk_bench.device_check import Report
from kdk_bench.device_comparison import AGREES
from kdk_bench.records import environment, today

SCHEMA = "kdk.device-check/1"
MEANING = {0: "everything was done and holds", 1: "something does not hold", 3: "what was done holds; something was not done or is unknown"}


def as_json(found: Report, seconds: float, budget: float, code: int) -> dict[str, Any]:
    """The report `kdk.device-check/1`: the comparisons, and what was not done. check.json and bench.json hold the rest."""
    return {
        "schema": SCHEMA,
        "dry_run": found.dry,
        "devices": [asdict(d) for d in found.devices],
        "seconds": seconds,
        "budget": budget,
        "exit_code": code,
        "comparisons": [c.as_json() for c in found.compared],
        "not_done": [{"phase": phase, "what": what, "why": why} for phase, what, why in found.not_done],
        "environment": environment(),
        "date": today(),
    }


def write(found: Report, folder: Path, seconds: float, budget: float, code: int) -> None:
    """All files, and the summary on standard output."""
    bench = reporting.as_json(found.raced)
    checks.write_json(checks.check_json(found.checked), str(folder / "check.json"))
    checks.write_json(bench, str(folder / "bench.json"))
    checks.write_json(as_json(found, seconds, budget, code), str(folder / "device-check.json"))
    drawn = list(plots.pictures(bench["results"])) if importlib.util.find_spec("matplotlib") else []
    (folder / "bench.html").write_text(page.render(bench["results"], drawn))
    (folder / "index.html").write_text(_page(found, seconds, budget, code, bool(drawn)))
    _summary(found, folder, seconds, code)


def _rows(found: Report) -> list[tuple[str, str, str, str, str, str]]:
    """Per row of the check: its name, target, evidence and outcomes; the comparison's outcomes and largest difference."""
    lines = []
    for row in dict.fromkeys(r.row for r in found.checked):
        mine, others = [r for r in found.checked if r.row == row], [c for c in found.compared if c.row == row]
        largest = max((c.difference for c in others if c.difference is not None), default=None)
        lines.append(
            (
                f"{row.op} {row.direction} {row.dtype}",
                f"{row.implementation} {row.target}",
                mine[0].evidence or "none",
                _counted([r.outcome for r in mine]),
                _counted([c.outcome for c in others]) or "not done",
                "" if largest is None else f"{largest:.2f}",
            )
        )
    return lines


def _counted(outcomes: Sequence[str]) -> str:
    return ", ".join(f"{outcome} {count}" for outcome, count in Counter(outcomes).items())


def _named(found: Report) -> list[tuple[str, str, str]]:
    """Whatever is not as it should be, by name: (what it is, where, why)."""
    named = [(r.outcome, f"check {r.row}, {r.case}", r.reason) for r in found.checked if r.outcome == checks.FAILED]
    named += [(c.outcome, f"compare {c.row}, {c.case}", c.reason) for c in found.compared if c.outcome != AGREES]
    broken = [e for e in found.raced if e.outcome in reporting.BROKEN]
    return named + [(e.outcome, f"bench {e.heat.op}.{e.heat.direction} {e.contender}", e.reason) for e in broken]


def _page(found: Report, seconds: float, budget: float, code: int, drawn: bool) -> str:
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    template = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined).get_template("device_check.html")
    values = {"dry": found.dry, "devices": found.devices, "raced": len(found.raced), "drawn": drawn}
    values |= {"rows": _rows(found), "named": _named(found), "not_done": found.not_done}
    values |= {"seconds": seconds, "budget": budget, "meaning": MEANING[code], "environment": environment(), "date": today()}
    return template.render(values)


def _summary(found: Report, folder: Path, seconds: float, code: int) -> None:
    """Standard output: every difference, and everything that was not done, by name."""
    evidence = sorted({r.evidence for r in found.checked if r.evidence})
    print(f"check ({', '.join(evidence) or 'nothing'}): {_counted([r.outcome for r in found.checked])}")
    print(f"simulators against {'themselves' if found.dry else 'the device'}: {_counted([c.outcome for c in found.compared]) or 'nothing'}")
    print(f"bench: {_counted([e.outcome for e in found.raced]) or 'nothing'}")
    for outcome, where, why in _named(found):
        print(f"  {outcome}: {where}: {why}")
    for phase, what, why in found.not_done:
        print(f"  not done: {phase} {what}: {why}")
    print(f"{MEANING[code]}, in {seconds:.0f} s; the report is {folder / 'index.html'}", file=sys.stdout, flush=True)
