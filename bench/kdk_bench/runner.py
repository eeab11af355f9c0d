"""Many rows of a check: which there are, and how they run side by side in processes that may die."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kdk.backends import LANGUAGES, TARGETS
from kdk.dispatch import kernel_file
from kdk.errors import UsageError
from kdk.registry import OPERATORS, require
from kdk_bench.check import Result, Row, run_row
from kdk_bench.places import place
from kdk_bench.shrinking import with_smaller
from kdk_bench.workers import DIED, HUNG, LATE, each

DIRECTIONS = ("forward", "backward")
LIMIT, FULL_LIMIT = 600.0, 7200.0  # seconds for a row of the quick and the full tier: far more than one that does not hang takes


@dataclass(frozen=True)
class Plan:
    """What to run, and how. directory: a bare folder with operators of the author's own. limit: seconds for a row, 0 the usual
    ones; a row that takes longer is given up, except in this process (jobs=0), which cannot end itself."""

    rows: Sequence[Row]
    full: bool = False
    seed: int = 0
    case: str = ""
    directory: str | None = None
    limit: float = 0.0

    @property
    def seconds(self) -> float:
        return self.limit or (FULL_LIMIT if self.full else LIMIT)


def targets_of(names: Iterable[str]) -> list[str]:
    """Chips for `--target`: a chip's name, or a platform's for all of its chips."""
    found: list[str] = []
    for name in names:
        chips = [t for language in LANGUAGES.values() if name in language.platforms for t in language.targets]
        if not chips and name not in TARGETS and name != "cpu":
            platforms = [p for language in LANGUAGES.values() for p in language.platforms]
            limit = f"chips are {', '.join(TARGETS)}, platforms cpu, {', '.join(platforms)}"
            way_out = "name one of these; a platform stands for all of its chips"
            raise UsageError("KDK-TARGET", "unknown target", value=repr(name), limit=limit, way_out=way_out)
        found += chips or [name]
    return list(dict.fromkeys(found))


def _targets(implementation: str, wanted: Sequence[str]) -> list[str]:
    if implementation not in LANGUAGES:
        return ["cpu"] if not wanted or "cpu" in wanted else []
    if not wanted:
        return [LANGUAGES[implementation].targets[0]]
    return [t for t in wanted if t in LANGUAGES[implementation].targets]


def rows_of(
    ops: Sequence[str], implementations: Sequence[str], directions: Sequence[str], targets: Sequence[str], dtypes: Sequence[str]
) -> list[Row]:
    """Every row that the filters leave; an empty filter leaves all."""
    require(ops)
    rows = []
    for name in ops or OPERATORS:
        op = OPERATORS[name].op
        for direction in directions or DIRECTIONS:
            if op.function(direction) is None:
                continue
            has_torch = kernel_file(op, "torch", direction)
            usual = ["reference", *(["torch"] if has_torch else []), *LANGUAGES]
            for implementation in implementations or usual:
                for target in _targets(implementation, targets):
                    rows += [Row(name, direction, implementation, target, d) for d in op.dtypes if d in dtypes or not dtypes]
    return rows


def begin(directory: str | None) -> None:
    """In a worker: its share of the cores is one, and the author's operators are loaded."""
    import torch

    torch.set_num_threads(1)
    if directory:
        from kdk.registry import load_directory

        load_directory(directory)


def work(row: Row, plan: Plan) -> list[Result]:
    """Check a row where it can run."""
    where = place(row.implementation, row.target)
    results = run_row(row, where, full=plan.full, seed=plan.seed, case=plan.case, directory=plan.directory)
    return results if plan.case else with_smaller(results, row, where, full=plan.full, seed=plan.seed, directory=plan.directory)


def lost(row: Row, how: str, plan: Plan) -> Result:
    """The row that a process took with it, or did not come to."""
    reasons = {
        DIED: "the process died while it ran this row (a crash inside the kernel, its simulator, or out of memory)",
        HUNG: f"no end after {plan.seconds:g} s: the row was given up (a loop in the kernel, its simulator or its compiler that "
        "does not end, or a slow machine: --row-limit)",
        LATE: "not done: the time was up before it ended",
    }
    return Result(row, "all", "unknown", reason=reasons[how])


def run(plan: Plan, *, jobs: int = 0, progress: Callable[[], None] = lambda: None) -> list[Result]:
    """Run every row: in this process when jobs is 0, else in that many. Results in the rows' order."""
    done: dict[Row, list[Result]] = {}
    for row, results in _run_all(plan, jobs):
        done[row] = results
        progress()
    return [result for row in plan.rows for result in done[row]]


def _run_all(plan: Plan, jobs: int) -> Iterator[tuple[Row, list[Result]]]:
    if jobs == 0:
        for row in plan.rows:
            yield row, work(row, plan)
        return
    one = functools.partial(work, plan=Plan((), plan.full, plan.seed, plan.case, plan.directory))
    starting = functools.partial(begin, plan.directory)
    for row, results in each(starting, one, plan.rows, jobs=jobs, limit=plan.seconds):
        yield row, [lost(row, results, plan)] if results in (DIED, HUNG) else results
