"""What a platform does with an operator, by the best evidence there is: measured > live dispatcher > dated table > unknown."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdk_bench.audit.chips import CHIPS, Chip
from kdk_bench.audit.expanding import CHILDREN
from kdk_bench.audit.trace import Call, Meta

TABLES = Path(__file__).parent / "tables"
WORST = ("native", "conditional", "decomposed", "unknown", "host", "error")
"""From best to worst; the worst part of a composite is its own."""
# Made on the host by torch itself, on every platform.
EVERYWHERE = ("aten::lift_fresh", "aten::detach", "aten::alias")


@dataclass(frozen=True)
class Support:
    """status: native, conditional (a documented condition is not met or not known to be), decomposed (torch's composite, all of
    whose parts are there), host (the platform goes on, on the host), error, unknown. evidence: measured or declared."""

    status: str
    condition: str = ""
    evidence: str = "declared"
    source: str = ""
    seconds: float | None = None

    def as_json(self) -> dict[str, str]:
        return {"status": self.status, "condition": self.condition, "evidence": self.evidence, "source": self.source}


LAYOUTS = ("contiguous", "channels_last", "strided")
UNKNOWN = Support("unknown", "no table or dispatcher names it", "declared", "")


@functools.cache
def descriptions() -> dict[str, Any]:
    """platforms.json: what is documented of each platform."""
    return dict(json.loads((TABLES.parent / "platforms.json").read_text()))


@dataclass
class Platform:
    """A platform with its tables, best first. measured: (operator, tensors) -> what a probe saw on the device."""

    name: str
    chip: Chip
    tables: list[Mapping[str, Any]]
    measured: dict[tuple[str, tuple[str, ...]], Support] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def describes(self) -> Mapping[str, Any]:
        return dict(descriptions()[self.name])

    def of(self, name: str, metas: Sequence[Meta] = (), call: Call | None = None) -> Support:
        """The support of an operator for tensors like these."""
        key = (name, tuple(str(m) for m in metas))
        if key in self.measured:
            return self.measured[key]
        found = self._declared(name)
        odd = next((m.layout for m in metas if m.layout not in LAYOUTS), "")
        if odd and self.name != "cuda" and found.status in ("native", "decomposed"):
            return Support("unknown", f"a {odd} tensor: the tables speak of strided ones", found.evidence, found.source)
        for condition in self.describes["conditions"]:
            if found.status in ("native", "decomposed", "unknown") and _applies(condition, name, metas, call):
                status = "conditional" if found.status != "unknown" else "unknown"
                return Support(status, condition["says"], "declared", f"{condition['source']}; {found.source}".rstrip("; "))
        return found

    def has_native(self, name: str) -> bool:
        """Whether the platform has a kernel of its own for a composite, so that its parts never run."""
        return any(name in table["ops"]["native"] for table in self.tables)

    def _declared(self, name: str, above: tuple[str, ...] = ()) -> Support:
        aliases = self.describes["aliases"].get(name)
        if aliases:
            parts = [self._declared(alias, (*above, name)) for alias in aliases if alias not in above]
            worst = max(parts, key=lambda s: WORST.index(s.status))
            status = "native" if len(aliases) == 1 and worst.status == "native" else _composite(worst.status)
            return Support(status, f"there it is {', '.join(aliases)}", worst.evidence, worst.source)
        for table in self.tables:
            found = self._in_table(name, table, above)
            if found is not None:
                return found
        if name in EVERYWHERE or not name.startswith("aten::"):
            return _outside_aten(name)
        return UNKNOWN

    def _in_table(self, name: str, table: Mapping[str, Any], above: tuple[str, ...]) -> Support | None:
        ops, source = table["ops"], f"{table['source']}, {table['date']}"
        if name in _set(table, "native") or name in EVERYWHERE:
            return Support("native", "", "declared", source)
        for listed in (name, name.partition(".")[0]):  # lists for people name no overloads
            if listed in ops.get("host", ()):
                return Support("host", ops["host"][listed], "declared", source)
            if listed in ops.get("conditional", ()):
                return Support("conditional", ops["conditional"][listed], "declared", source)
            if listed in ops.get("families", ()):
                return Support("native", "", "declared", source)
        if name in ops["structured"]:
            delegate = ops["structured"][name]
            if delegate in _set(table, "native"):
                return Support("native", f"through {delegate}", "declared", source)
            return self._missing(f"through {delegate}, which it lacks", source)
        if name in _set(table, "explicit"):
            return self._parts(name, table, above, source)
        if name in _set(table, "composite"):
            return Support("decomposed", "a composite: its parts are listed themselves", "declared", source)
        if name in _set(table, "refused"):
            return self._missing("no kernel", source)
        return None

    def _parts(self, name: str, table: Mapping[str, Any], above: tuple[str, ...], source: str) -> Support:
        parts = CHILDREN.get(name)
        if parts is None:
            return Support("unknown", "torch's composite of it could not be expanded", "declared", source)
        if not parts:
            return Support("native", "torch itself: no data moves", "declared", source)
        results = [(part, self._declared(part, (*above, name))) for part in parts if part not in above and part != name]
        if not results:
            return Support("unknown", "torch's composite of it calls itself", "declared", source)
        part, worst = max(results, key=lambda r: WORST.index(r[1].status))
        condition = f"torch's composite, of {', '.join(parts)}"
        if worst.status in ("error", "host", "unknown"):
            condition = f"torch's composite needs {part}: {worst.condition}"
        return Support(_composite(worst.status), condition, "declared", source)

    def _missing(self, why: str, source: str) -> Support:
        status = self.describes["missing"]
        return Support(status, f"{why}; {self.describes['does']}", "declared", source)


def _composite(status: str) -> str:
    return "decomposed" if status == "native" else status


def _outside_aten(name: str) -> Support:
    if name in EVERYWHERE:
        return Support("native", "", "declared", "torch itself")
    library = name.partition("::")[0]
    return Support("unknown", f"an operator of the library {library}, outside aten", "declared", "")


def _set(table: Mapping[str, Any], kind: str) -> frozenset[str]:
    """The names of one kind, made once per table: it is kept in the table itself, so that it goes with it."""
    found = table.get(f"set of {kind}")
    if found is None:
        found = table[f"set of {kind}"] = frozenset(table["ops"][kind])  # type: ignore[index]
    return found  # type: ignore[no-any-return]


def _applies(condition: Mapping[str, Any], name: str, metas: Sequence[Meta], call: Call | None) -> bool:
    if "ops" in condition and name not in condition["ops"]:
        return False
    if "dtypes" in condition:
        return any(m.dtype in condition["dtypes"] for m in metas)
    if "layouts" in condition:
        return any(m.layout in condition["layouts"] for m in metas)
    value = argument(call, condition["argument"]) if call is not None else None
    return isinstance(value, int) and value > condition["above"]


def argument(call: Call, name: str) -> Any:
    """The value of an argument of a call, by its name in the schema."""
    import torch

    packet = getattr(getattr(torch.ops, call.op.partition("::")[0]), call.op.partition("::")[2])
    schema = getattr(packet, call.overload)._schema
    for position, parameter in enumerate(schema.arguments):
        if parameter.name == name:
            if name in call.kwargs:
                return call.kwargs[name]
            return call.args[position] if position < len(call.args) else parameter.default_value
    return None


class LiveLookUp:
    """The dispatcher of a plugin that is installed here, asked in a process of its own while the model runs."""

    def __init__(self, plugin: str) -> None:
        self.plugin = plugin
        self.process: subprocess.Popen[str] | None = None
        if plugin and importlib.util.find_spec(plugin):
            command = [sys.executable, "-m", "kdk_bench.audit.tables.dispatcher", plugin]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def result(self) -> tuple[dict[str, Any] | None, str]:
        """(its table, or why there is none)."""
        if self.process is None:
            return None, f"{self.plugin} is not installed here: its dated table speaks for it" if self.plugin else ""
        try:
            out, errors = self.process.communicate(timeout=300)
            if self.process.returncode == 0:
                table = json.loads(out)
                table["source"] = "live, " + table["source"]
                return table, ""
            why = (errors.strip().splitlines() or [f"exit code {self.process.returncode}"])[-1]
        except (subprocess.TimeoutExpired, ValueError) as error:
            self.process.kill()
            why = f"{type(error).__name__}: {error}"
        return None, f"{self.plugin} is installed here and its dispatcher could not be asked ({why}): its dated table speaks for it"


def platforms(
    targets: Iterable[str], live: Mapping[str, LiveLookUp], imported: Mapping[str, Mapping[str, Any]], evidence: Iterable[Mapping[str, Any]]
) -> list[Platform]:
    """The platforms of `targets`: their names, or chips of theirs."""
    result = []
    for target in targets:
        name = CHIPS[target].platform if target in CHIPS else target
        described = descriptions()[name]
        chip = CHIPS[target] if target in CHIPS else CHIPS[described["chip"]]
        table, note = live[name].result() if name in live else (None, "")
        tables = [t for t in (imported.get(name), table, json.loads((TABLES / described["table"]).read_text())) if t]
        platform = Platform(name, chip, tables, notes=[note] if note else [])
        for report in evidence:
            if report["platform"] == name:
                platform.measured.update(measurements(report))
        result.append(platform)
    return result


def measurements(report: Mapping[str, Any]) -> dict[tuple[str, tuple[str, ...]], Support]:
    """What a probe's report says, by operator and tensors."""
    source = f"probe on {report['device']} with {report['versions']}, {report['date']}"
    words = {"native": "native", "fallback": "host", "error": "error", "wrong": "error"}  # a skipped one shows nothing
    found = {}
    for row in report["ops"]:
        if row["outcome"] not in words:
            continue
        status = words[row["outcome"]]
        condition = "" if row["outcome"] == "native" else f"{row['outcome']}: {row.get('detail', '')}".rstrip(": ")
        key = (row["op"], tuple(row["tensors"]))
        found[key] = Support(status, condition, "measured", source, row.get("seconds"))
    return found


def measured_in(result: Mapping[str, Any], report: Mapping[str, Any], file: str) -> str:
    """How much of the model a probe's report speaks of, in words."""
    keys = set(measurements(report))
    groups = [(op["op"] if op["overload"] == "default" else f"{op['op']}.{op['overload']}", tuple(op["tensors"])) for op in result["ops"]]
    number = sum(group in keys for group in groups)
    if not number:
        return f"{file} speaks of none of this model's operators with these dtypes and shapes: it is another model's, and says nothing here"
    return f"{file}: {number} of {len(groups)} groups of calls are measured on {report['platform']}"
