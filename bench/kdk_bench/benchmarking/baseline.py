"""Against an earlier run: each contender's time as a multiple of the eager reference's, which ran in turns with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdk.errors import UsageError
from kdk_bench.benchmarking.contenders import EAGER
from kdk_bench.benchmarking.statistics import Ratio, ratio_of_ratios

KEY = ("op", "direction", "case", "dtype", "target", "contender")
READ = {*KEY, "implementation", "samples", "sizes"}


@dataclass(frozen=True)
class Change:
    """How one of kdk's own entries changed: new / old, both relative to the eager reference of their own run."""

    key: tuple[str, ...]
    ratio: Ratio

    def regressed(self, percent: float) -> bool:
        """Slower by more than `percent`, and the whole interval says so."""
        return self.ratio.low > 1 + percent / 100

    def __str__(self) -> str:
        return f"{' '.join(self.key)}: {self.ratio.value:.3f} of the baseline's ({self.ratio.low:.3f}-{self.ratio.high:.3f})"


def load(file: str) -> list[dict[str, Any]]:
    """The results of a `kdk.bench/1` report; UsageError for anything else."""
    limit, way_out = "kdk.bench/1, as `kdk bench --json` writes it", "write one with `kdk bench --json FILE`"
    try:
        report = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise UsageError("KDK-BASELINE", f"cannot read the baseline {file}", value=str(error), limit=limit, way_out=way_out) from None
    if not isinstance(report, dict) or report.get("schema") != "kdk.bench/1":
        schema = report.get("schema") if isinstance(report, dict) else type(report).__name__
        raise UsageError("KDK-BASELINE", f"{file} is not a report of kdk bench", value=schema, limit=limit, way_out=way_out)
    results = report.get("results")
    if not isinstance(results, list) or not all(isinstance(r, dict) and set(r) >= READ for r in results):
        problem = f"the results of {file} are cut or corrupt"
        value = f"{len(results)} results" if isinstance(results, list) else type(results).__name__
        raise UsageError("KDK-BASELINE", problem, value=value, limit=f"each has {', '.join(sorted(READ))}", way_out=way_out)
    return list(results)


def _index(results: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], Mapping[str, Any]]:
    return {tuple(r[name] for name in KEY): r for r in results if r["samples"]}


def changes(new: Sequence[Mapping[str, Any]], old: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Every entry of kdk's own that both runs timed, at equal sizes."""
    now, before, found = _index(new), _index(old), []
    for key, result in now.items():
        other, yardstick = before.get(key), (*key[:-1], EAGER)
        if other is None or not result["implementation"] or other["sizes"] != result["sizes"]:
            continue
        if yardstick in now and yardstick in before:
            pair = (result["samples"], now[yardstick]["samples"])
            found.append(Change(key, ratio_of_ratios(pair, (other["samples"], before[yardstick]["samples"]))))
    return found
