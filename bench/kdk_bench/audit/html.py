"""The report as one page that needs nothing else: no network, no other file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdk.errors import UsageError
from kdk_bench.audit.audit import verdict
from kdk_bench.audit.terminal import time

TEMPLATES = Path(__file__).parent / "templates"


def write_html(report: Mapping[str, Any], file: str) -> None:
    """Write the page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["duration"] = time
    verdicts = {p["name"]: verdict(report, p) for p in report["platforms"]}
    page = environment.get_template("report.html.j2").render(report=report, verdicts=verdicts)
    try:
        Path(file).write_text(page)
    except OSError as error:
        raise UsageError("AUDIT-HTML", f"{file} could not be written", value=str(error), way_out="a file in a folder of yours") from None
