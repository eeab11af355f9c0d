"""Make a failing case smaller and simpler while it still fails."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kdk.op import Op
from kdk.registry import OPERATORS
from kdk_bench.check import Result, Row, guarded, reproduce, run_case
from kdk_bench.declared_cases import cases_of
from kdk_bench.generate import Problem, fit, problems
from kdk_bench.places import Place
from kdk_bench.spelling import DEFAULTS, spell

MOST_TRIES = 60  # of one row: a try costs what the case costs


def shrink(op: Op, problem: Problem, fails: Callable[[Problem], bool]) -> Problem:
    """The smallest case found that `fails`, called as `spell` spells it. `problem` itself fails."""
    tries = iter(range(MOST_TRIES))

    def still(candidate: Problem) -> bool:
        return next(tries, None) is not None and fails(candidate)

    before, now = None, _named(op, problem)
    while before != now:
        before = now
        for letter in now.sizes:
            now = _smallest(op, now, letter, still)
        for simpler in _simpler(op, now):
            if now != (changed := _named(op, replace(now, **simpler))) and still(changed):
                now = changed
    return now


def _named(op: Op, problem: Problem) -> Problem:
    return replace(problem, name=spell(op, problem), counted=math.prod(problem.sizes.values()) > 1)


def _smallest(op: Op, problem: Problem, letter: str, still: Callable[[Problem], bool]) -> Problem:
    """Bisect one letter's size, as if whatever is larger than a size that fails did fail too."""
    passes = 0
    while problem.sizes[letter] - passes > 1:
        middle = (problem.sizes[letter] + passes) // 2 if passes else 1
        candidate = _resized(op, problem, letter, middle)
        if candidate is not None and still(candidate):
            problem = candidate
        else:
            passes = middle
    return problem


def _resized(op: Op, problem: Problem, letter: str, size: int) -> Problem | None:
    """None where the operator's restrictions leave no smaller size."""
    sizes = fit({**problem.sizes, letter: size}, cases_of(op).dims)
    if sizes[letter] >= problem.sizes[letter] or any(sizes[other] > n for other, n in problem.sizes.items()):
        return None
    lead = {name: (*(1,) * (len(spread) - 1), sizes[name]) if spread else spread for name, spread in problem.lead.items()}
    scalars = {**problem.scalars, **{scalar: sizes[own] for own, scalar in op.sized.items()}}
    return _named(op, replace(problem, sizes=sizes, lead=lead, scalars=scalars))


def _simpler(op: Op, problem: Problem) -> Iterator[dict[str, Any]]:
    """Changes that make a case easier to think about."""
    yield {"lead": {letter: (problem.sizes[letter],) for letter in problem.lead}}
    yield {"scalars": {**problem.scalars, **{name: options[0] for name, options in cases_of(op).scalars.items()}}}
    for name, usual in DEFAULTS.items():
        if name != "needs":
            yield {name: usual}
    yield {"needs": tuple(op.uses)}
    for name in op.uses if len(problem.needs) > 1 else ():
        yield {"needs": (name,)}


def with_smaller(results: Sequence[Result], row: Row, place: Place, *, full: bool, seed: int, directory: str | None) -> list[Result]:
    """A row's results; the line that reproduces its smallest failing case gives a still smaller one."""
    failed = [r for r in results if r.outcome == "failed" and r.rank]
    if not failed:
        return list(results)
    smallest = min(failed, key=lambda r: r.rank)
    operator = OPERATORS[row.op]
    problem = next(p for p in problems(operator.op, row.direction, full=full, seed=seed) if p.name == smallest.case)

    def fails(candidate: Problem) -> bool:
        work = functools.partial(run_case, operator, row, candidate, place, seed, {}, True)
        result = guarded(work, row, candidate.name)
        # Wrong values stay wrong values: a crash of a smaller case may be another fault.
        return result.outcome == "failed" and (result.error_ratio is None) == (smallest.error_ratio is None)

    if not fails(_named(operator.op, problem)):
        return list(results)
    line = reproduce(row, shrink(operator.op, problem, fails).name, seed, False, directory)
    return [replace(r, reproduce=line) if r is smallest else r for r in results]
