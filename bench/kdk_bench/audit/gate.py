"""--fail-on: which findings make the command fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdk.errors import UsageError

GATES = ("missing", "fallback", "unknown", "new")


def parse(text: str | None, baseline: bool) -> tuple[str, ...]:
    """The gates of --fail-on; without it missing and fallback, and with a baseline also new."""
    if text is None:
        return ("missing", "fallback", "new") if baseline else ("missing", "fallback")
    gates = tuple(part.strip() for part in text.split(",") if part.strip())
    for gate in gates:
        if gate not in GATES:
            raise UsageError("AUDIT-FAIL-ON", "unknown gate", value=repr(gate), limit=f"there are {', '.join(GATES)}")
    if "new" in gates and not baseline:
        raise UsageError("AUDIT-FAIL-ON", "--fail-on new compares with an earlier report", way_out="add --baseline FILE")
    return gates


def failing(report: Mapping[str, Any], gates: Sequence[str], baseline: bool) -> list[Mapping[str, Any]]:
    """The findings that fail. With a baseline only new ones: what was known then does not fail again."""
    kinds = {"missing": ("missing", "library"), "fallback": ("fallback",), "unknown": ("unknown",)}
    wanted = {kind for gate in gates for kind in kinds.get(gate, ())}
    found = []
    for finding in report["findings"]:
        is_new = finding["new"]
        if (finding["kind"] in wanted and (is_new or not baseline)) or ("new" in gates and is_new and finding["blocking"]):
            found.append(finding)
    return found


def exit_code(report: Mapping[str, Any], gates: Sequence[str], baseline: bool) -> int:
    """0 holds; 1 a gate failed; 3 the capture ended early, or the gate asks for missing operators and some are unknown."""
    if failing(report, gates, baseline):
        return 1
    if report["capture"]["error"]:
        return 3
    unknown = [f for f in report["findings"] if f["kind"] == "unknown" and (f["new"] or not baseline)]
    return 3 if unknown and set(gates) & {"missing", "fallback"} else 0
