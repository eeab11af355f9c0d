"""`python -m kdk_bench.mutation`: plant faults in every kernel and count how many the quick tier finds."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click
from rich.console import Console

from kdk_bench.mutation.explained import EXPLAINED
from kdk_bench.mutation.kept import Kept
from kdk_bench.mutation.mutants import all_mutants, sample
from kdk_bench.mutation.report import is_right, problems, show
from kdk_bench.mutation.units import files, sharing, units
from kdk_bench.mutation.workers import Work, run


@click.command()
@click.argument("ops", nargs=-1)
@click.option("--direction", multiple=True, type=click.Choice(["forward", "backward"]))
@click.option("--language", multiple=True, help="triton, pallas or nki")
@click.option("--count", default=20, show_default=True, help="mutants per operator, direction and language that must count")
@click.option("--seed", default=0, show_default=True)
@click.option("--jobs", default=2, show_default=True)
@click.option(
    "--kept",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("build/mutants"),
    show_default=True,
    help="what became of every mutant so far; a run that was stopped goes on from there",
)
@click.option("--json", "path", type=click.Path(path_type=Path), help="write every mutant and its fate to this file")
def main(
    ops: tuple[str, ...],
    direction: tuple[str, ...],
    language: tuple[str, ...],
    count: int,
    seed: int,
    jobs: int,
    directory: Path,
    path: Path | None,
) -> None:
    """Plant faults in the kernels of OPS (all of them by default)."""
    begin = time.monotonic()
    console = Console(width=140)
    chosen = units(ops, direction, language)
    works, candidates = [], set()
    for unit in chosen:
        mutants = all_mutants(unit)
        candidates |= {m.key for m in mutants}
        works.append(Work(unit, sample(mutants, seed), count))
    others = [Work(unit, [], 0) for unit in sharing(chosen)]
    for work in works:
        work.sharing = [other for other in (*works, *others) if other is not work and files(other.unit) & files(work.unit)]
    kept = Kept(directory, seed)
    for work in [*works, *others]:
        kept.restore(work)
    if done := sum(len(work.trials) for work in works):
        console.print(f"{done} mutants ran before: {directory}", highlight=False)

    def progress(work: Work, settled: bool) -> None:
        kept.save(work)
        if settled and not work.trials[-1][1].kill and (mutant := work.trials[-1][0]).key not in EXPLAINED:
            console.print(f"survived: {mutant}", markup=False, highlight=False, soft_wrap=True)
        if work.trials and work.finished():
            killed = sum(t.kill not in ("", "stillborn") for _, t in work.trials)
            seconds = time.monotonic() - begin
            console.print(f"{seconds:5.0f} s  {work.unit}: {killed} of {work.counting()} killed", highlight=False)

    run([*works, *others], jobs, seed, progress)
    if path is not None:
        _write(path, works)
    show(works, console)
    failures = problems(works, candidates)
    for failure in failures:
        console.print(f"does not hold: {failure}", markup=False, soft_wrap=True)
    console.print(f"{time.monotonic() - begin:.0f} s, seed {seed}")
    sys.exit(1 if failures else 0)


def _write(path: Path, works: list[Work]) -> None:
    rows = [
        {"key": m.key, "class": m.kind, "line": m.line, "kill": t.kill, "step": t.step, "reason": t.reason}
        | {"cause": t.cause, "right": is_right(m, t.cause), "details": t.details, "seconds": round(t.seconds, 2), "by": t.by}
        for work in works
        for m, t in work.trials
    ]
    path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
