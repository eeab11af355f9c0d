"""Check an implementation against its reference: through torch's own operator, on inputs at the edges, by the acceptance rule.

The unit of work is a `Row`: one operator, direction, implementation, target and dtype. `run_row` gives a `Result` per case.
"""

from __future__ import annotations

import functools
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import kdk.ops  # noqa: F401  (registers the operators)
from kdk.errors import DeclarationError, KdkError, RefusedError
from kdk.op import Op
from kdk.registry import OPERATORS
from kdk.rounding import storing
from kdk.torch_library import Operator
from kdk_bench.diagnose import Diagnosis, diagnose, explain
from kdk_bench.drawing import Arguments, draw
from kdk_bench.generate import Problem, longest, problems
from kdk_bench.numerics import Pool, informative, judge, same_bits, sloppy, yardstick
from kdk_bench.places import Place
from kdk_bench.reference_quality import coarse
from kdk_bench.spelling import parse

MOVES = 8  # of the inputs, to see how far the oracle moves
DEGENERATE = 2**62  # rank of empty and one-element cases
INFORMATIVE_SHARE = 0.8  # of an operator's counted cases; below it a check says little


@dataclass(frozen=True)
class Row:
    """One unit of work. target: a chip, or "cpu" for what runs there natively."""

    op: str
    direction: str
    implementation: str
    target: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.op}.{self.direction} {self.implementation} {self.target} {self.dtype}"


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


@dataclass(frozen=True)
class Call:
    """Arguments of one call, by position; the storages behind the tensors; and names of what comes back."""

    args: tuple[Any, ...]
    storages: tuple[Tensor, ...]
    names: tuple[str, ...]

    def map(self, change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        """The arguments with every floating-point tensor changed."""
        return tuple([change(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in self.args])


# ---- what is called ---------------------------------------------------------------------------------------------------


def _forward_call(op: Op, inputs: Arguments, problem: Problem) -> Call:
    args = [inputs.tensors[n] if n in inputs.tensors else problem.scalars[n] for n in op.arguments]
    return Call(tuple(args), inputs.storages, (*op.outputs, *op.saved))


def _backward_call(op: Op, inputs: Arguments, grads: Arguments, problem: Problem, dtype: torch.dtype | None) -> Call:
    """The backward as autograd would call it: only what the needed gradients read is there. dtype: compute all in it.

    Outputs that it reads are given, like inputs: as the forward stored them.
    """
    assert op.backward is not None
    up = (lambda t: t.to(dtype) if t.is_floating_point() else t) if dtype else (lambda t: t)
    forward = _forward_call(op, inputs, problem)
    results = op.reference(*forward.map(up))
    results = results if isinstance(results, tuple) else (results,)
    available = dict(zip(op.arguments, forward.map(up)))
    available |= dict(zip(op.saved, results[len(op.outputs) :]))
    if any(output in reads for output in op.outputs for reads in op.uses.values()):
        stored = op.reference(*forward.args)
        available |= dict(zip(op.outputs, map(up, stored if isinstance(stored, tuple) else (stored,))))
    keep = {read for name in problem.needs for read in op.uses[name]}
    parameters = list(inspect.signature(op.backward).parameters)
    args: list[Any] = [None if n in problem.absent else up(grads.tensors[n]) for n in op.outputs]
    for name in parameters[len(op.outputs) : -1]:
        scalar = not isinstance(available[name], Tensor)
        args.append(available[name] if scalar or name in keep else None)
    names = tuple(f"grad {name}" for name in op.uses)
    return Call((*args, ",".join(problem.needs)), (*inputs.storages, *grads.storages), names)


def _outputs(result: Any) -> tuple[Tensor | None, ...]:
    """The results of an operator; what a backward did not compute is None, or (0,)-shaped where the schema wants a tensor."""
    return result if isinstance(result, tuple) else (result,)


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


def _moved(args: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    """float64 arguments, each element a rounding of float32 away. What the oracle makes of that is what no kernel can know.

    Elements at one place of different arguments move together in some moves and against each other in others: two moves
    that cancel in all of them would hide how much the result hangs on either (x and rstd of a norm of one element).
    """
    step = torch.finfo(torch.float32).eps

    def move(t: Tensor, argument: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        code = 1 + (torch.randint(0, MOVES - 1, t.shape, generator=generator) + argument) % (MOVES - 1)
        differ = code & number  # rows of a Hadamard matrix: of two codes, every pair of signs comes equally often
        sign = 1 - 2 * ((differ ^ differ >> 1 ^ differ >> 2) & 1)
        return t * (1 + step * sign)

    return tuple([move(a, i) if isinstance(a, Tensor) and a.dtype == torch.float64 else a for i, a in enumerate(args)])


def _spread(oracle: Tensor | None, moved: list[Tensor | None]) -> Tensor | None:
    found = [(m - oracle).abs() for m in moved if m is not None and oracle is not None]
    return torch.stack(found).amax(0) if found else None


class Expectation:
    """What the reference says about one case: oracle, yardstick and the reference itself, for every result."""

    def __init__(self, operator: Operator, row: Row, problem: Problem, seed: int) -> None:
        op = operator.op
        self.problem, self.row = problem, row
        dtype = getattr(torch, row.dtype)
        function = op.function(row.direction)
        assert function is not None
        self.function = function
        self.refused: tuple[str, Tensor, Tensor, Tensor, int] | None = None
        inputs = draw(op, op.tensors, problem, dtype, seed)
        with storing(dtype):
            if row.direction == "forward":
                self.call = _forward_call(op, inputs, problem)
                wide = self.call.map(lambda t: t.double())
                in_32 = function(*self.call.map(lambda t: t.float()))
            else:
                grads = draw(op, op.outputs, problem, dtype, seed, prefix="gradient of ")
                self.call = _backward_call(op, inputs, grads, problem, None)
                wide = _backward_call(op, inputs, grads, problem, torch.float64).args
                in_32 = function(*_backward_call(op, inputs, grads, problem, torch.float32).args)
            self.oracle = _outputs(function(*wide))
            moved = [_outputs(function(*_moved(wide, number))) for number in range(MOVES)]
        self.spread = [_spread(o, results) for o, *results in zip(self.oracle, *moved)]
        self.reference = _outputs(function(*self.call.args))
        self.in_float32 = _outputs(in_32)
        self.longest = [longest(op, name, problem) for name in self.call.names]
        self.yardstick = [
            None if r is None or o is None or f is None else yardstick(r, f, o, longest=n)
            for r, o, f, n in zip(self.reference, self.oracle, self.in_float32, self.longest)
        ]

    def sloppy(self) -> str | None:
        """Why the reference fails its own check, or None."""
        rows = zip(self.call.names, self.reference, self.yardstick, self.oracle, self.longest, self.in_float32, self.spread)
        for name, r, y, o, n, f, spread in rows:
            if r is not None and y is not None and o is not None and f is not None:
                reason = sloppy(r, y, o, longest=n) or coarse(f, o, longest=n, spread=spread)
                if reason:
                    return f"{name}: {reason}"
        return None

    def judge(self, got: tuple[Tensor | None, ...], pools: dict[str, Pool]) -> tuple[str, float, bool]:
        """(why the results are wrong, or "", the worst error ratio, whether any result could tell right from wrong)."""
        worst, telling = 0.0, False
        rows = zip(self.call.names, got, self.yardstick, self.oracle, self.longest, self.spread)
        for name, k, y, o, n, spread in rows:
            if y is None or o is None:
                if k is not None and k.shape != (0,):
                    return f"{name}: computed although it is not needed", worst, telling
                continue
            if k is None:
                return f"{name}: missing", worst, telling
            verdict = judge(k, y, o, longest=n, spread=spread)
            worst = max(worst, verdict.error_ratio)
            if not verdict.accepted:
                self.refused = name, k, y, o, n
                return f"{name}: {verdict.reason}", worst, telling
            if not k.is_contiguous():
                return f"{name}: strides {k.stride()}, the fake promises a contiguous result", worst, telling
            telling = telling or informative(y, o, longest=n, spread=spread)
            if self.problem.counted:
                pools.setdefault(name, Pool()).add(k, y, o)
        return "", worst, telling

    def diagnose(self) -> Diagnosis | None:
        """What the result that `judge` refused looks like, and the likely cause; None where the values are not to blame."""
        if self.refused is None:
            return None
        name, k, y, o, n = self.refused
        if k.shape != o.shape or k.dtype != y.dtype:
            return None
        position = self.call.names.index(name)
        tensors = {f"argument {i}": a for i, a in enumerate(self.call.args) if isinstance(a, Tensor)}

        def again(inputs: Mapping[str, Tensor]) -> Tensor:
            args = [inputs.get(f"argument {i}", a) for i, a in enumerate(self.call.args)]
            result = _outputs(self.function(*args))[position]
            assert result is not None
            return result

        return diagnose(k.cpu(), y, o, inputs=tensors, longest=n, reference=again)


def run_case(operator: Operator, row: Row, problem: Problem, place: Place, seed: int, pools: dict[str, Pool], twice: bool) -> Result:
    """Run one case and judge it. Raises what the kernel raises. twice: again with other values, and once more."""
    expected = Expectation(operator, row, problem, seed)
    own_fault = expected.sloppy()
    if own_fault:
        return Result(row, problem.name, "failed", reason=own_fault)
    torch_op = operator.forward if row.direction == "forward" else operator.backward
    before = [s.clone() for s in expected.call.storages]
    args = place.move(expected.call.args)

    def run() -> tuple[Tensor | None, ...]:
        with torch.no_grad(), poisoned_memory():
            return _outputs(torch_op(*args, impl=place.impl))

    got = run()
    reason, ratio, telling = expected.judge(got, pools)
    if not reason and twice:
        reason = _second_run(operator, row, problem, place, seed, pools, run, got)
    if not reason and not all(same_bits(a, b) for a, b in zip(expected.call.storages, before)):
        reason = "an input was written to"
    if not reason and place.moved and not all(same_bits(a, b) for a, b in _tensor_pairs(args, expected.call.args)):
        reason = "an input was written to"
    outcome = "failed" if reason else "passed" if telling or not problem.counted else "uninformative"
    return Result(row, problem.name, outcome, ratio, reason, diagnose=expected.diagnose if reason else None)


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
    torch_op = operator.forward if row.direction == "forward" else operator.backward
    with torch.no_grad(), poisoned_memory():
        reason, _, _ = other.judge(_outputs(torch_op(*place.move(other.call.args), impl=place.impl)), pools)
    if reason:
        return f"second call, with other values: {reason}"
    for name, first, copy in zip(other.call.names, got, kept):
        if first is not None and copy is not None and not same_bits(first, copy):
            return f"{name}: a later call changed this result: a buffer is kept from call to call"
    for name, copy, second in zip(other.call.names, kept, run()):
        if copy is not None and second is not None and operator.op.deterministic and not same_bits(second, copy):
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
