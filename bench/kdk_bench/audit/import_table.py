"""The vendor's table of operators in Markdown: which aten operators torch-neuronx has, with which conditions, and which run on the
host.

The columns are found by their headings, so that a column more or another order does no harm: one names the operator, one says
whether it is supported; dtypes, fallbacks and remarks become conditions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdk.errors import UsageError
from kdk_bench.audit.tables.dispatcher import SCHEMA
from kdk_bench.records import today

YES = ("yes", "supported", "native", "✅", "✓", "✔", "full", "true", "neuron")
NO = ("no", "unsupported", "not supported", "❌", "✗", "✘", "false")
HOST = ("cpu", "host", "fallback")
PARTLY = ("partial", "limited", "conditional", "⚠")


def rows(text: str) -> Iterator[dict[str, str]]:
    """Every row of every table, by the headings in small letters."""
    headings: list[str] = []
    for line in text.splitlines():
        if not line.strip().startswith("|"):
            headings = []
            continue
        cells = [cell.strip().strip("`*") for cell in line.strip().strip("|").split("|")]
        if all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            continue
        if not headings:
            headings = [cell.lower() for cell in cells]
        else:
            yield dict(zip(headings, cells))


def _column(row: dict[str, str], *words: str) -> str:
    return next((value for heading, value in row.items() if any(word in heading for word in words)), "")


def read_markdown(file: str) -> dict[str, Any]:
    """The table of the report, in the form of the shipped ones."""
    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("AUDIT-TABLE", f"{file} could not be read", value=str(error), way_out="a Markdown file of the vendor's") from None
    listed: dict[str, Any] = {kind: [] for kind in ("native", "families", "explicit", "composite", "refused")}
    ops: dict[str, Any] = {**listed, "structured": {}, "host": {}, "conditional": {}}
    number = 0
    for row in rows(text):
        names = _names(_column(row, "op", "name", "function"))
        status = _column(row, "support", "status", "neuron", "device").lower()
        remarks = _column(row, "dtype", "type"), _column(row, "note", "remark", "limitation", "comment", "constraint")
        remark = "; ".join(filter(None, remarks))
        fallback = _column(row, "fallback", "cpu").lower()
        number += len(names)
        execution = _column(row, "execution", "runs", "placement").lower()
        if _has(status, HOST) or _has(execution, HOST) or (_has(fallback, YES) and not _has(fallback, NO)):
            ops["host"] |= dict.fromkeys(names, remark or "on the CPU, as the vendor's table says")
        elif _has(status, NO):
            ops["host"] |= dict.fromkeys(names, remark or "not supported, as the vendor's table says")
        elif _has(status, PARTLY) or remark:
            ops["conditional"] |= dict.fromkeys(names, remark or "partly, as the vendor's table says")
        elif _has(status, YES):
            ops["families"] += names  # of a name without an overload: all of them
    if not number:
        limit = "a Markdown table with a column that names operators (aten::mm, torch.mm) and one that says if they are supported"
        raise UsageError("AUDIT-TABLE", f"{file} has no table of operators", limit=limit)
    source = f"the vendor's table, {Path(file).name}"
    return {"schema": SCHEMA, "platform": "neuron", "version": "", "source": source, "date": today(), "ops": ops}


def _has(text: str, words: tuple[str, ...]) -> bool:
    if words is YES and _has(text, NO):
        return False
    return any(re.search(rf"(^|\W){re.escape(word)}($|\W)", text) if word.isascii() else word in text for word in words)


def _names(text: str) -> list[str]:
    """ "aten::add.Tensor" from the ways in which tables write names, one or several in a cell; a link's address is none."""
    text = re.sub(r"\]\([^)]*\)", " ", text)
    found = re.findall(r"(?:aten::|aten\.|torch\.(?:ops\.aten\.|nn\.functional\.|Tensor\.)?)([A-Za-z_]\w*(?:\.\w+)?)", text)
    if not found and (match := re.match(r"[\[\s`*]*([A-Za-z_]\w*(?:\.\w+)?)", text)):
        found = [match[1]]
    return [f"aten::{name.removesuffix('.default')}" for name in found]
