"""The half-hour kit: one script that measures a model's operators on a rented device, and needs nothing of kdk there."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdk.errors import UsageError
from kdk_bench.audit.trace import Call

SCRIPT = Path(__file__).parent / "templates" / "probe.py"
CPU_ONLY = ("_for_cpu", "mkldnn")
MARK = "OPERATORS: list = []"


def emit(report: Mapping[str, Any], folder: str) -> Path:
    """Write probe.py into the folder, with every group of the report that can be called with random tensors."""
    target = Path(folder)
    rows = [[r["op"], r["overload"], r["arguments"], r["tensors"], r["count"]] for r in _rows(report)]
    text = SCRIPT.read_text()
    assert MARK in text
    listing = "OPERATORS: list = json.loads(r'''\n" + json.dumps(rows, indent=0) + "\n''')"
    path = target / "probe.py"
    try:
        target.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(MARK, listing))
    except OSError as error:
        raise UsageError("AUDIT-PROBE", f"{path} could not be written", value=str(error), way_out="a folder of yours") from None
    return path


def _rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    seen: dict[str, dict[str, Any]] = {}
    for op in report["ops"]:
        # What only a CPU has is another operator on the device, whose table speaks for it.
        if op["op"].startswith("aten::") and not any(word in op["op"] for word in CPU_ONLY) and op["arguments"] is not None:
            key = json.dumps([op["op"], op["overload"], op["tensors"]])
            if key in seen:
                seen[key]["count"] += op["count"]
            else:
                seen[key] = dict(op)
    return list(seen.values())


def arguments(call: Call) -> list[Any] | None:
    """A call's arguments as JSON: tensors as {"tensor": text}; None where one cannot be written down (a generator)."""
    metas = iter(call.metas)

    def plain(value: Any) -> Any:
        kind = type(value).__name__
        if kind == "Ref":
            return {"tensor": str(next(metas))}
        if value is None or isinstance(value, bool | int | float | str):
            return value if not isinstance(value, float) or math.isfinite(value) else {"float": str(value)}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        if kind in ("dtype", "layout", "memory_format"):
            return {"torch": str(value).removeprefix("torch.")}
        if kind == "device":
            return {"device": True}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        raise TypeError(kind)

    try:
        return [plain(list(call.args)), {k: plain(v) for k, v in call.kwargs.items()}]
    except TypeError:
        return None
