"""A report as pictures in a folder, or as one self-contained HTML page."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdk_bench.benchmarking import plots
from kdk_bench.benchmarking.reporting import amount, seconds
from kdk_bench.records import environment, today


def write(results: Sequence[Mapping[str, Any]], folder: str | None, file: str | None) -> None:
    """PNG files into `folder`, the page into `file`; either may be None."""
    pictures = list(plots.pictures(results))
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, png in pictures:
            (Path(folder) / f"{name.replace(' ', '-')}.png").write_bytes(png)
    if file:
        Path(file).write_text(render(results, pictures))


def render(results: Sequence[Mapping[str, Any]], pictures: Sequence[tuple[str, bytes]]) -> str:
    """The page: nothing is loaded from elsewhere."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parents[1] / "templates")
    template = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined).get_template("bench.html")
    races, absent = _races(r for r in results if "modelled_seconds" not in r), _races(r for r in results if "modelled_seconds" in r)
    for mine in races.values():
        mine.sort(key=lambda r: (r["seconds"].get("p50") is None, r["seconds"].get("p50")))
    images = [(name, base64.b64encode(png).decode()) for name, png in pictures]
    values = {"seconds": seconds, "amount": amount, "environment": environment(), "date": today()}
    return template.render(races=races, absent=absent, images=images, **values)


def _races(results: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    races: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for result in results:
        races.setdefault(tuple(result[n] for n in ("op", "direction", "case", "dtype", "target")), []).append(result)
    return races
