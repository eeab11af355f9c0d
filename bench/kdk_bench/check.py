"""Check an implementation against its reference: through torch's own operator, on inputs at the edges, by the acceptance rule.

The unit of work is a `Row`: one operator, direction, implementation, target and dtype. `run_row` gives a `Result` per case.
"""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import kdk.ops  # noqa: F401  (registers the operators)
from kdk import tuning
from kdk.errors import DeclarationError, KdkError, RefusedError
from kdk.registry import OPERATORS
from kdk.torch_library import Operator
from kdk_bench.diagnose import Diagnosis, explain
from kdk_bench.expectation import Expectation, Row, outputs_of
from kdk_bench.generate import Problem, problems
from kdk_bench.numerics import Pool, same_bits
from kdk_bench.places import Place
from kdk_bench.spelling import parse

DEGENERATE = 2**62  # rank of empty and one-element cases
INFORMATIVE_SHARE = 0.8  # of an operator's counted cases; below it a check says little


@dataclass(frozen=True)
class Result:
    """The outcome of one case: passed, failed, refused, uninformative (passed, but zeros or the mean would too) or unknown."""

    row: Row
    case: str
    outcome: str
    error_ratio: float | None = None
    reason: str = ""
    reproduce: str = ""
    evidence: str = ""
    rank: int = 0
    """A case's size, by which the most telling failure is found: the smallest, degenerate ones last. 0: not a case."""
    diagnose: Callable[[], Diagnosis | None] | None = field(default=None, compare=False, repr=False)
    """Says what is likely wrong; costly, so asked of the smallest failing case alone, and gone from a finished result."""


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, torch.empty is full of NaN (or the largest integer), so that what a kernel does not write shows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


# ---- one case ---------------------------------------------------------------------------------------------------------


def run_case(operator: Operator, row: Row, problem: Problem, place: Place, seed: int, pools: dict[str, Pool], twice: bool) -> Result:
    """Run one case and judge it. Raises what the kernel raises. twice: again with other values, and once more."""
    expected = Expectation(operator, row, problem, seed)
    own_fault = expected.sloppy()
    if own_fault:
        return Result(row, problem.name, "failed", reason=own_fault)
    before = [s.clone() for s in expected.call.storages]
    args = place.move(expected.call.args)

    run = functools.partial(_outputs, operator, row, problem, place, args)
    got = run()
    reason, ratio, telling = expected.judge(got, pools)
    if not reason and twice:
        reason = _second_run(operator, row, problem, place, seed, pools, run, got)
    if not reason and not all(same_bits(a, b) for a, b in zip(expected.call.storages, before)):
        reason = "an input was written to"
    if not reason and place.moved and not all(same_bits(a, b) for a, b in _tensor_pairs(args, expected.call.args)):
        reason = "an input was written to"
    outcome = "failed" if reason else "passed" if telling or not problem.counted else "uninformative"
    return Result(row, problem.name, outcome, ratio, reason or "; ".join(expected.notes), diagnose=expected.diagnose if reason else None)


def _outputs(operator: Operator, row: Row, problem: Problem, place: Place, args: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    torch_op = operator.forward if row.direction == "forward" else operator.backward
    with torch.no_grad(), poisoned_memory(), tuning.smallest() if problem.launch == "smallest" else nullcontext():
        return outputs_of(torch_op(*args, impl=place.impl))


def _tensor_pairs(left: tuple[Any, ...], right: tuple[Any, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    for a, b in zip(left, right):
        if isinstance(a, Tensor):
            yield a.cpu(), b


def _second_run(
    operator: Operator,
    row: Row,
    problem: Problem,
    place: Place,
    seed: int,
    pools: dict[str, Pool],
    run: Callable[[], Any],
    got: tuple[Tensor | None, ...],
) -> str:
    """Run other inputs, then the same again: a result or a buffer kept from call to call, or a race, shows."""
    kept = [None if t is None else t.clone() for t in got]
    other = Expectation(operator, row, problem, seed + 1)
    reason, _, _ = other.judge(_outputs(operator, row, problem, place, place.move(other.call.args)), pools)
    if reason:
        return f"second call, with other values: {reason}"
    for name, first, copy in zip(other.call.names, got, kept):
        if first is not None and copy is not None and not same_bits(first, copy):
            return f"{name}: a later call changed this result: a buffer is kept from call to call"
    claimed = operator.op.deterministic
    deterministic = claimed(**problem.scalars) if callable(claimed) else claimed
    for name, copy, second in zip(other.call.names, kept, run()):
        if copy is not None and second is not None and deterministic and not same_bits(second, copy):
            return f"{name}: two runs on equal inputs differ, although the operator is declared deterministic"
    return ""


# ---- one row ----------------------------------------------------------------------------------------------------------


def reproduce(row: Row, case: str, seed: int, full: bool, directory: str | None) -> str:
    words = ["kdk check", row.op, f"--implementation {row.implementation}", f"--direction {row.direction}"]
    words += [f"--target {row.target}", f"--dtype {row.dtype}", f'--case "{case}"', f"--seed {seed}"]
    words += ["--full"] if full else []
    words += [f"--ops {directory}"] if directory else []
    return " ".join(words)


def guarded(run: Callable[[], Result], row: Row, case: str) -> Result:
    """A result whatever happens: a refusal and a crash of the kernel are outcomes, not the end of the check."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()
    except RefusedError as error:
        return Result(row, case, "refused", reason=str(error.value))
    except KdkError as error:
        return Result(row, case, "failed", reason=str(error))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:500]
        return Result(row, case, "failed", reason=f"{type(error).__name__}: {text} ({where.name}, line {where.lineno})")


def run_row(row: Row, place: Place, *, full: bool = False, seed: int = 0, case: str = "", directory: str | None = None) -> list[Result]:
    """Every case of a row, one more result for 16-bit outputs pooled over the cases, and one if too few cases could tell."""
    operator = OPERATORS[row.op]
    try:
        if "=" in case:
            chosen = [parse(operator.op, case)]
        else:
            chosen = [p for p in problems(operator.op, row.direction, full=full, seed=seed) if case in ("", p.name)]
    except DeclarationError as error:  # of a package that is installed; costs the other operators nothing
        return [Result(row, "all", "failed", reason=str(error), evidence=place.evidence)]
    pools: dict[str, Pool] = {}
    results = []
    for i, problem in enumerate(chosen):
        twice = full or i == 0
        work = functools.partial(run_case, operator, row, problem, place, seed, pools, twice)
        result = guarded(work, row, problem.name)
        results.append(replace(result, rank=problem.elements if problem.counted else DEGENERATE))
        if result.outcome == "refused" and len(results) >= 3 and all(r.outcome == "refused" for r in results):
            break  # a refusal of every call: the rest would say the same
    failed = [i for i, r in enumerate(results) if r.diagnose is not None]
    if failed:
        smallest = min(failed, key=lambda i: results[i].rank)
        results[smallest] = _explained(results[smallest])
    if not case:
        results += pooled(row, pools) + _too_few(row, results, {p.name for p in chosen if p.counted})
    return [
        replace(
            r,
            diagnose=None,
            evidence=place.evidence,
            reproduce=reproduce(row, r.case, seed, full, directory) if r.outcome == "failed" and r.rank else "",
        )
        for r in results
    ]


def _explained(result: Result) -> Result:
    assert result.diagnose is not None
    try:
        found = result.diagnose()
        text = explain(found) if found is not None else ""
    except Exception as error:
        # The verdict stands without a guess at its cause.
        text = f"no diagnosis: {type(error).__name__}: {error}"
    return replace(result, reason=f"{result.reason}. {text}" if text else result.reason)


def pooled(row: Row, pools: Mapping[str, Pool]) -> list[Result]:
    """One result for each 16-bit output, over all the cases it was in."""
    results = []
    for name, pool in pools.items():
        verdict = pool.verdict()
        if verdict:
            outcome = "passed" if verdict.accepted else "failed"
            results.append(Result(row, f"{name}, all cases pooled", outcome, verdict.error_ratio, verdict.reason))
    return results


def _too_few(row: Row, results: list[Result], counted: set[str]) -> list[Result]:
    """A row whose cases mostly pass for zeros too has shown nothing."""
    judged = [r for r in results if r.case in counted and r.outcome in ("passed", "uninformative", "failed")]
    telling = [r for r in judged if r.outcome != "uninformative"]
    if not judged or len(telling) >= INFORMATIVE_SHARE * len(judged):
        return []
    reason = f"only {len(telling)} of {len(judged)} cases can tell a right kernel from zeros, at least {INFORMATIVE_SHARE:.0%} must"
    return [Result(row, "share of informative cases", "unknown", None, reason)]
