"""One row: an operator's kernel, one case and dtype, one target. And many of them, stored or compiled side by side."""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kdk import tuning
from kdk.backends import LANGUAGES, Compiled, one_line
from kdk.cases import Case
from kdk.dispatch import kernel_file, load_kernel, refusal
from kdk.errors import DeclarationError
from kdk.indices import Indices
from kdk.op import Op
from kdk.registry import OPERATORS
from kdk_bench.compiling import sources
from kdk_bench.compiling.described import arguments
from kdk_bench.declared_cases import cases_of
from kdk_bench.expectation import Row
from kdk_bench.records import environment, today
from kdk_bench.runner import begin
from kdk_bench.workers import DIED, HUNG, each

LIMIT = 600.0  # seconds for one row
BROKEN_PROMISE = "supports() takes it, the compiler does not: "


@dataclass(frozen=True)
class Task:
    """One unit of work. case: the name of a model's shape; "" is the primary one."""

    row: Row
    case: str = ""


@dataclass(frozen=True)
class Result:
    """compiled; refused, by `supports`, for a dtype, or by the compiler; failed: over a budget, or its Python raised; unknown.

    holds: nothing is broken. A compiler that refuses what `supports` takes breaks a promise.
    """

    row: Row
    case: str
    outcome: str
    reason: str = ""
    resources: Mapping[str, Any] = field(default_factory=dict)
    evidence: str = "compiled"
    holds: bool = True
    environment: Mapping[str, str] = field(default_factory=environment)
    date: str = field(default_factory=today)

    def as_json(self) -> dict[str, Any]:
        """A row of the report `kdk.compile/1`."""
        values = asdict(self)
        return {**values.pop("row"), **values}


def case_of(op: Op, name: str) -> Case | None:
    """The model's case of a name, the primary one for ""; None where there is none."""
    models = cases_of(op).models
    return models[0] if not name else next((c for c in models if c.name == name), None)


def case_names(op: str) -> list[str]:
    """The models' cases of an operator."""
    return [case.name for case in cases_of(OPERATORS[op].op).models]


def tasks_of(rows: Iterable[Row], case: str) -> list[Task]:
    """A task for every row whose operator has the case."""
    return [Task(row, case) for row in rows if not case or case_of(OPERATORS[row.op].op, case)]


def _key(task: Task) -> str | None:
    """None where there is nothing to store: no kernel, or cases that do not fit."""
    row = task.row
    op = OPERATORS[row.op].op
    kernel = kernel_file(op, row.implementation, row.direction)
    try:
        case = case_of(op, task.case)
    except DeclarationError:
        return None
    if kernel is None or case is None:
        return None
    launch = tuning.table(op, row.target).part("launch", row.direction, row.dtype, case.sizes)
    what = {**asdict(row), "case": [case.name, dict(case.sizes), dict(case.scalars)], "launch": launch}
    return sources.key(kernel, op.package, row.implementation, what)


def call(task: Task) -> tuple[Callable[..., Any], tuple[Any, ...], str | None]:
    """What runs, on which arguments, and the reason why it would refuse them: as the operator's body does it."""
    row = task.row
    op, language = OPERATORS[row.op].op, LANGUAGES[row.implementation]
    case = case_of(op, task.case)
    language.module("launch").prepare()
    kernel = load_kernel(op, row.implementation, row.direction)
    assert case is not None and kernel is not None
    args = Indices(op, row.direction).narrowed(arguments(op, row.direction, case, row.dtype))
    reason = refusal(language, row.target, kernel)(args)
    parameters = tuning.launch_parameters(op, row.direction, row.target, kernel, warnings.warn)(args)
    return kernel.configured(parameters), kernel.arguments(*args), reason


def compile_task(task: Task) -> Result:
    """Compile one kernel. Whatever happens is a result."""
    row = task.row
    op, compiler = OPERATORS[row.op].op, LANGUAGES[row.implementation].module("compile")
    result = Result(row, task.case, "unknown")
    try:
        case = case_of(op, task.case)
        assert case is not None
        result = replace(result, case=case.name)
        if kernel_file(op, row.implementation, row.direction) is None:
            return replace(result, outcome="refused", reason=f"{op.name} has no {row.implementation} kernel for its {row.direction}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function, args, reason = call(task)
            if reason:
                return replace(result, outcome="refused", reason=reason)
            lacks = compiler.missing()
            if lacks:
                return replace(result, reason=lacks)
            return _judged(result, compiler.compile_for(function, args, row.target))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {one_line(error)} ({place.name}, line {place.lineno})"
        return replace(result, outcome="failed", reason=text, holds=False)


def _judged(result: Result, compiled: Compiled) -> Result:
    """A compiler's answer, held against the budgets and what `supports` promised."""
    outcome, reason = compiled.outcome, compiled.reason
    if compiled.exceeded:
        outcome, reason = "failed", f"over budget: {'; '.join(compiled.exceeded)}"
    elif outcome == "refused":
        reason = f"{BROKEN_PROMISE}{reason}"
    holds = outcome in ("compiled", "unknown")
    return replace(result, outcome=outcome, reason=reason, resources=compiled.resources, evidence=compiled.evidence, holds=holds)


def _stored(task: Task, number: str | None) -> Result | None:
    found = sources.load(number) if number else None
    if found is None:
        return None
    return Result(task.row, **{name: value for name, value in found.items() if name not in asdict(task.row)})


def run(tasks: Sequence[Task], *, jobs: int, directory: str | None, progress: Callable[[], None] = lambda: None) -> list[Result]:
    """A result for every task, in their order: stored ones, the others compiled in `jobs` processes, or in this one when 0."""
    numbers = {task: _key(task) for task in tasks}
    done: dict[Task, Result] = {}
    for task in tasks:
        stored = _stored(task, numbers[task])
        if stored is not None:
            done[task] = stored
            progress()
    left = [task for task in tasks if task not in done]
    for task, result in _compiled(left, jobs, directory):
        number = numbers[task]
        done[task] = _lost(task, result) if result in (DIED, HUNG) else result
        if number and (done[task].outcome in ("compiled", "refused") or done[task].resources):
            sources.store(number, done[task].as_json())
        progress()
    return [done[task] for task in tasks]


def _compiled(tasks: Sequence[Task], jobs: int, directory: str | None) -> Iterator[tuple[Task, Any]]:
    if jobs == 0:
        for task in tasks:
            yield task, compile_task(task)
    elif tasks:
        yield from each(functools.partial(begin, directory), compile_task, tasks, jobs=min(jobs, len(tasks)), limit=LIMIT)


def _lost(task: Task, how: str) -> Result:
    case = case_of(OPERATORS[task.row.op].op, task.case)
    reason = "the compiler's process died on this row" if how == DIED else f"the compiler did not end within {LIMIT:.0f} s"
    return Result(task.row, case.name if case else task.case, "unknown", reason=reason)


def timelines(tasks: Iterable[Task]) -> Iterator[tuple[Task, list[dict[str, Any]]]]:
    """The engines' modelled timeline of every row whose back end has one, as trace events."""
    for task in tasks:
        compiler = LANGUAGES[task.row.implementation].module("compile")
        if hasattr(compiler, "timeline"):
            function, args, _ = call(task)
            yield task, compiler.timeline(function, args, task.row.target)
