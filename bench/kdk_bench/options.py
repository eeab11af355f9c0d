"""What the commands of the command line share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import click

JSON = click.option("--json", "json_file", metavar="FILE", help="Write the report as JSON; - is standard output.")
OPS = click.option("--ops", "directory", metavar="DIR", help="Also take the operators in a folder of your own.")
JOBS = click.option(
    "--jobs", type=click.IntRange(min=0), default=None, metavar="N", help="Processes; 0 runs in this one. Default: one per core."
)
GITHUB = click.option("--github", is_flag=True, help="Also print GitHub annotations.")
DIRECTION = click.option("--direction", "directions", multiple=True, type=click.Choice(["forward", "backward"]))
TARGET = click.option(
    "--target", "targets", multiple=True, metavar="CHIP", help="sm_90, v6e, trn2 ...; a platform stands for all its chips."
)
DTYPE = click.option("--dtype", "dtypes", multiple=True, metavar="DTYPE", help="float32, bfloat16, float16.")


def options(*given: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator."""

    def add(function: Any) -> Any:
        for option in reversed(given):
            function = option(function)
        return function

    return add


def load(directory: str | None) -> list[str]:
    """Register the operators; the names of those in `directory`."""
    import kdk.ops  # noqa: F401
    from kdk.registry import load_directory

    if not directory:
        return []
    from kdk_bench.declared_cases import cases_of

    own = [operator.op for operator in load_directory(directory)]
    for op in own:
        cases_of(op)  # what does not fit the declaration shows here, and not in a worker
    return [op.name for op in own]


def known(names: Sequence[str], there: Sequence[str]) -> None:
    """Raise UsageError for an implementation that there is not."""
    from kdk.errors import UsageError

    for name in names:
        if name not in there:
            limit = f"there are {', '.join(there)}"
            raise UsageError("KDK-IMPLEMENTATION", "unknown implementation", value=repr(name), limit=limit)


def progress(what: str, total: int) -> AbstractContextManager[Callable[[], None]]:
    """A progress bar on a terminal; what is yielded moves it on by one."""
    from rich.console import Console
    from rich.progress import Progress

    @contextmanager
    def bar() -> Any:
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as shown:
            task = shown.add_task(what, total=total)
            yield lambda: shown.advance(task)

    return bar()
