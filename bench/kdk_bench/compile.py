"""The command `kdk compile`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import click

from kdk_bench.options import DIRECTION, DTYPE, GITHUB, JOBS, JSON, OPS, TARGET, known, load, options, progress


@click.command("compile")
@click.argument("ops", nargs=-1, metavar="[OP]...")
@click.option("--implementation", "implementations", multiple=True, metavar="NAME", help="triton, pallas or nki.")
@options(DIRECTION, TARGET, DTYPE)
@click.option("--case", default="", metavar="NAME", help="A model's shape by its name. Default: the first of each operator.")
@click.option("--timeline", metavar="FILE", help="Write the modelled timeline of the NKI engines, for ui.perfetto.dev.")
@options(JOBS, GITHUB, JSON, OPS)
def compile_command(
    ops: tuple[str, ...],
    implementations: tuple[str, ...],
    directions: tuple[str, ...],
    targets: tuple[str, ...],
    dtypes: tuple[str, ...],
    case: str,
    timeline: str | None,
    jobs: int | None,
    github: bool,
    json_file: str | None,
    directory: str | None,
) -> int:
    """Compile kernels for chips that need not be here, at the size of a real model, and hold them against their budgets.

    Without OP, every operator; with --ops, those of that folder. Results are kept until a kernel or a version changes.
    """
    own = load(directory)
    from kdk.backends import LANGUAGES, TARGETS
    from kdk.errors import UsageError
    from kdk_bench import report as reports
    from kdk_bench import runner
    from kdk_bench.compiling import report, rows

    known(implementations, list(LANGUAGES))
    wanted = runner.targets_of(targets) or list(TARGETS)
    found = runner.rows_of(ops or own, implementations or list(LANGUAGES), directions, wanted, dtypes)
    if not found:
        raise UsageError("KDK-COMPILE", "nothing to compile: the filters leave no row", way_out="`kdk list` shows what there is")
    tasks = rows.tasks_of(found, case)
    if not tasks:
        names = sorted({name for row in found for name in rows.case_names(row.op)})
        raise UsageError("KDK-CASE", "no model's case has this name", value=repr(case), limit=f"there are {', '.join(names)}")
    jobs = (os.cpu_count() or 1) if jobs is None else jobs
    console = reports.console(to_stderr=json_file == "-")
    with progress("compiling", len(tasks)) as advance:
        results = rows.run(tasks, jobs=jobs, directory=directory, progress=advance)
    report.tables(results, console)
    if github:
        for line in report.github_lines(results):
            click.echo(line, err=json_file == "-")
    if json_file:
        reports.write_json(report.as_json(results), json_file)
    if timeline:
        compiled = [task for task, result in zip(tasks, results) if result.outcome == report.COMPILED]
        written = write_timeline(rows.timelines(compiled), timeline)
        console.print(f"timelines of {written} rows are in {timeline}, modelled")
    return report.exit_code(results)


def write_timeline(found: Iterable[tuple[Any, list[dict[str, Any]]]], file: str) -> int:
    """Trace events of several rows in one file, each row's processes under its name. The number of rows."""
    from kdk.errors import UsageError
    from kdk_bench import report as reports

    together: list[dict[str, Any]] = []
    count, first = 0, 0
    for task, events in found:
        for event in events:
            event["pid"] += first
            if event["name"] == "process_name":
                event["args"]["name"] = f"{task.row}: {event['args']['name']}"
        together += events
        first = 1 + max((event["pid"] for event in together), default=first)
        count += 1
    if not count:
        raise UsageError("KDK-TIMELINE", "no compiled row has a timeline", limit="NKI kernels have one", way_out="--target trn2")
    content = {"traceEvents": together, "displayTimeUnit": "ns", "otherData": {"evidence": "modelled"}}
    reports.write(json.dumps(content), file, "the timeline", "a file in a folder that is there")
    return count
