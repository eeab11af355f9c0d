"""What the reference says about one case: the oracle, the yardstick and the reference itself; and the verdict on a kernel's results."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdk.layouts import format_for, promised
from kdk.op import Op
from kdk.rounding import storing
from kdk.torch_library import Operator
from kdk_bench.conditioning import MOVES, furthest, larger, moved, reordered
from kdk_bench.diagnose import Diagnosis, diagnose
from kdk_bench.discrete import Dequantised, judge_choice
from kdk_bench.drawing import Arguments, draw, scalar
from kdk_bench.generate import Problem, longest, shape
from kdk_bench.numerics import Pool, Verdict, informative, judge, same_bits, sloppy, yardstick
from kdk_bench.orders import ORDERS, Order, Reordered
from kdk_bench.reference_quality import coarse


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
class Call:
    """Arguments of one call, by position; the storages behind the tensors; and names of what comes back."""

    args: tuple[Any, ...]
    storages: tuple[Tensor, ...]
    names: tuple[str, ...]


def wider(op: Op, args: tuple[Any, ...], dtype: torch.dtype | None) -> tuple[Any, ...]:
    """Arguments with every floating-point tensor in `dtype`; and the dtypes that the results are asked for in, except of a
    quantiser. None: as they are."""
    if dtype is None:
        return args

    def change(a: Any) -> Any:
        if isinstance(a, Tensor):
            return a.to(dtype) if a.is_floating_point() else a
        return dtype if isinstance(a, torch.dtype) and a.is_floating_point and not op.quantised else a

    return tuple([change(a) for a in args])


def outputs_of(result: Any) -> tuple[Tensor | None, ...]:
    """The results of an operator; what a backward did not compute is None, or (0,)-shaped where the schema wants a tensor."""
    return result if isinstance(result, tuple) else (result,)


Chosen = Mapping[str, Tensor]


def forward_results(op: Op, args: tuple[Any, ...], chosen: Chosen | None) -> tuple[Tensor | None, ...]:
    """Outputs and saved tensors of the reference; those that belong to a choice, where one was made."""
    if chosen is None or op.choice is None:
        return outputs_of(op.reference(*args))
    others = iter(outputs_of(op.choice.given(dict(zip(op.arguments, args)), dict(chosen))))
    return tuple([chosen[name] if name in chosen else next(others) for name in (*op.outputs, *op.saved)])


def _chosen(op: Op, results: tuple[Tensor | None, ...]) -> dict[str, Tensor] | None:
    if op.choice is None:
        return None
    have = dict(zip((*op.outputs, *op.saved), results))
    return {name: t.detach().cpu() for name in op.choice.outputs if (t := have[name]) is not None}


def _forward_call(op: Op, inputs: Arguments, problem: Problem) -> Call:
    args = [inputs.tensors[n] if n in inputs.tensors else scalar(op, n, problem.scalars[n]) for n in op.arguments]
    return Call(tuple(args), inputs.storages, (*op.outputs, *op.saved))


class _Backward:
    """The backward as autograd would call it: only what the needed gradients read is there.

    Outputs and choices that it reads are given, like inputs: as the forward stored them.
    """

    def __init__(self, op: Op, problem: Problem, dtype: torch.dtype, seed: int) -> None:
        self.op, self.problem = op, problem
        self.inputs = draw(op, op.tensors, problem, dtype, seed)
        self.forward = _forward_call(op, self.inputs, problem)
        self.stored = forward_results(op, self.forward.args, None)
        real = {n: t.dtype for n, t in zip(op.outputs, self.stored) if t is not None and t.is_floating_point()}
        self.flowing = {name: d for name, d in real.items() if name not in op.quantised}
        self.grads = draw(op, tuple(self.flowing), problem, dtype, seed, prefix="gradient of ", dtypes=self.flowing)

    def call(self, dtype: torch.dtype | None) -> Call:
        """dtype: everything that is not given computed in it."""
        op, problem = self.op, self.problem
        assert op.backward is not None
        args = wider(op, self.forward.args, dtype)
        results = self.stored if dtype is None else forward_results(op, args, _chosen(op, self.stored))
        available = dict(zip(op.arguments, args))
        available |= dict(zip(op.saved, results[len(op.outputs) :]))
        available |= dict(zip(op.outputs, wider(op, self.stored[: len(op.outputs)], dtype)))
        keep = {read for name in problem.needs for read in op.uses[name]}
        absent = problem.absent if set(self.flowing) - set(problem.absent) else ()
        given = [None if n in absent else self.grads.tensors.get(n) for n in op.outputs]
        grads = list(wider(op, tuple(given), dtype))
        reads = list(inspect.signature(op.backward).parameters)[len(op.outputs) : -1]
        held = [available[n] if n not in (*op.tensors, *op.outputs, *op.saved) or n in keep else None for n in reads]
        names = tuple(f"grad {name}" for name in op.uses)
        return Call((*grads, *held, ",".join(problem.needs)), (*self.inputs.storages, *self.grads.storages), names)


# ---- one case ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """Per result: oracle, the reference in float32, the reference and yardstick. inputs: how far the oracle moves with the inputs;
    spread: that, or how far sums in some order may be off where that is more. quantised: by name."""

    oracle: tuple[Tensor | None, ...]
    in_float32: tuple[Tensor | None, ...]
    reference: tuple[Tensor | None, ...]
    yardstick: list[Tensor | None]
    inputs: list[Tensor | None]
    spread: list[Tensor | None]
    quantised: dict[str, Dequantised]


class Expectation:
    """What the reference says about one case: oracle, yardstick and the reference itself, for every result."""

    def __init__(self, operator: Operator, row: Row, problem: Problem, seed: int) -> None:
        op = self.op = operator.op
        self.problem, self.row = problem, row
        self.dtype = getattr(torch, row.dtype)
        function = op.function(row.direction)
        assert function is not None
        self.function = function
        self.forward = row.direction == "forward"
        self.refused: tuple[str, Tensor, Tensor, Tensor, int] | None = None
        self.notes: list[str] = []
        with storing(self.dtype):
            if self.forward:
                self.call = _forward_call(op, draw(op, op.tensors, problem, self.dtype, seed), problem)
                self.wide = wider(op, self.call.args, torch.float64)
                self.near = wider(op, self.call.args, torch.float32)
            else:
                backward = _Backward(op, problem, self.dtype, seed)
                self.call = backward.call(None)
                self.wide, self.near = backward.call(torch.float64).args, backward.call(torch.float32).args
        self.moved = [moved(self.wide, self.call.args, number) for number in range(MOVES)]
        self.reference = outputs_of(function(*self.call.args))
        self.longest = [longest(op, name, problem) for name in self.call.names]
        self.choice = op.choice if self.forward else None
        self.chosen = _chosen(op, self.reference) if self.forward else None
        self.known = self._expect(self.chosen)

    def _results(self, args: tuple[Any, ...], chosen: Chosen | None) -> tuple[Tensor | None, ...]:
        return forward_results(self.op, args, chosen) if self.forward else outputs_of(self.function(*args))

    def _in_order(self, order: Order, chosen: Chosen | None) -> tuple[Tensor | None, ...]:
        with Reordered(order):
            return self._results(self.near, chosen)

    def _expect(self, chosen: Chosen | None) -> Known:
        """What belongs to a choice (None: the operator makes none)."""
        with storing(self.dtype):
            oracle, in_float32 = self._results(self.wide, chosen), self._results(self.near, chosen)
            after_moves = [self._results(args, chosen) for args in self.moved]
            in_order = [self._in_order(order, chosen) for order in ORDERS]
        reference = self.reference if chosen is None else self._results(self.call.args, chosen)
        inputs = [furthest(o, list(results)) for o, *results in zip(oracle, *after_moves)]
        spread = [larger(s, reordered(o, list(m), list(r))) for s, o, m, r in zip(inputs, oracle, zip(*after_moves), zip(*in_order))]
        discrete = {*self.op.quantised, *(chosen or ())}
        yardsticks = [
            None if r is None or o is None or f is None else r if name in discrete else yardstick(r, f, o, longest=n)
            for name, r, o, f, n in zip(self.call.names, reference, oracle, in_float32, self.longest)
        ]
        return Known(oracle, in_float32, reference, yardsticks, inputs, spread, self._quantised(oracle) if self.forward else {})

    def _quantised(self, oracle: tuple[Tensor | None, ...]) -> dict[str, Dequantised]:
        found = {}
        names = self.call.names
        for name, how in self.op.quantised.items():
            q, scale = oracle[names.index(name)], oracle[names.index(how.scale)]
            assert q is not None and scale is not None
            with storing(self.dtype):
                values, near, *after_moves = (how.of(dict(zip(self.op.arguments, args))) for args in (self.wide, self.near, *self.moved))
            n = self.longest[names.index(name)]
            found[name] = Dequantised(values, near, furthest(values, list(after_moves)), q, scale, n)
        return found

    def _judge_choice(self, chosen: Mapping[str, Tensor | None]) -> str:
        assert self.choice is not None and self.chosen is not None
        n = max(self.longest[self.call.names.index(name)] for name in self.choice.outputs)
        return judge_choice(self.choice, dict(zip(self.op.arguments, self.wide)), chosen, self.chosen, n)

    def _judge_one(self, i: int, k: Tensor, got: tuple[Tensor | None, ...]) -> tuple[Verdict, str]:
        """The verdict on result number i, and a note."""
        name, known = self.call.names[i], self.known
        y, o = known.yardstick[i], known.oracle[i]
        assert y is not None and o is not None
        if name in known.quantised:
            scale = got[self.call.names.index(self.op.quantised[name].scale)]
            if scale is None:
                return Verdict(False, "its scale is missing"), ""
            return known.quantised[name].judge(k, scale)
        return judge(k, y, o, longest=self.longest[i], spread=known.spread[i]), ""

    def _values_of(
        self, name: str, k: Tensor, y: Tensor, o: Tensor, got: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A result, its yardstick and its oracle; of a quantised one what its numbers stand for."""
        found = self.known.quantised.get(name)
        scale = got[self.call.names.index(self.op.quantised[name].scale)] if found else None
        if found is None or scale is None or k.shape != found.q.shape or k.dtype != found.q.dtype or scale.shape != found.scale.shape:
            return k, y, o
        return found.as_values(k, scale)

    def _misshapen(self) -> str | None:
        """The declared shapes against what the reference returns."""
        for name, r in zip(self.call.names, self.reference):
            declared = shape(self.op, name.removeprefix("grad "), self.problem)
            if r is not None and r.shape != declared and r.shape != (0,):
                text = self.op.shapes[name.removeprefix("grad ")]
                return f"{name}: `shapes` declares {text!r}, here {declared}; the reference returns {tuple(r.shape)}"
        return None

    def sloppy(self) -> str | None:
        """Why the reference fails its own check, or None."""
        misshapen = self._misshapen()
        if misshapen:
            return misshapen
        names, known = self.call.names, self.known
        if self.choice is not None and self.chosen is not None:
            with storing(self.dtype):
                oracles = _chosen(self.op, outputs_of(self.function(*self.wide)))
            for who, chosen in (("the reference", self.chosen), ("the reference in float64", oracles)):
                reason = self._judge_choice(dict(chosen or {}))
                if reason:
                    return f"{who} fails its own check: {reason}"
        for i, (name, r, y, o) in enumerate(zip(names, self.reference, known.yardstick, known.oracle)):
            if r is None or y is None or o is None or name in (self.chosen or ()):
                continue
            if name in known.quantised:
                verdict, _ = self._judge_one(i, r, self.reference)
                reason_ = None if verdict.accepted else f"the reference fails its own check: {verdict.reason}"
            else:
                reason_ = sloppy(r, y, o, longest=self.longest[i])
                near = known.in_float32[i]
                if not reason_ and near is not None:
                    reason_ = coarse(near, o, longest=self.longest[i], spread=known.inputs[i])  # sums of a coarse one are coarse too
            if reason_:
                return f"{name}: {reason_}"
        return None

    def _of_its_choice(self, got: tuple[Tensor | None, ...]) -> tuple[str, bool]:
        """Judge a kernel's choice, and expect from now on what belongs to it. (why it is wrong, whether zeros would be)."""
        if self.choice is None or self.chosen is None:
            return "", False
        names = self.call.names
        chosen = {name: got[names.index(name)] for name in self.choice.outputs}
        reason = self._judge_choice(chosen)
        if reason:
            name = self.choice.outputs[0]
            k, like = chosen[name], self.chosen[name]
            if k is not None:
                self.refused = name, k, like, like, 1
            return reason, False
        made = {name: t.detach().cpu() for name, t in chosen.items() if t is not None}
        if not all(same_bits(made[name], self.chosen[name]) for name in made):
            self.known = self._expect(made)
            self.notes.append("another choice than the reference's")
        return "", bool(self._judge_choice({name: torch.zeros_like(t) for name, t in self.chosen.items()}))

    def judge(self, got: tuple[Tensor | None, ...], pools: dict[str, Pool]) -> tuple[str, float, bool]:
        """(why the results are wrong, or "", the worst error ratio, whether any result could tell right from wrong)."""
        reason, telling = self._of_its_choice(got)
        worst = 0.0
        if reason:
            return reason, worst, telling
        known = self.known
        rank, kept = promised(self.call.args) if self.op.layouts else (0, torch.contiguous_format)
        for i, (name, k, y, o) in enumerate(zip(self.call.names, got, known.yardstick, known.oracle)):
            n, spread = self.longest[i], known.spread[i]
            if y is None or o is None:
                if k is not None and k.shape != (0,):
                    return f"{name}: computed although it is not needed", worst, telling
                continue
            if k is None:
                return f"{name}: missing", worst, telling
            if name not in (self.chosen or ()):
                verdict, note = self._judge_one(i, k, got)
                worst = max(worst, verdict.error_ratio)
                self.notes += [f"{name}: {note}"] if note else []
                if not verdict.accepted:
                    self.refused = name, *self._values_of(name, k, y, o, got), n
                    return f"{name}: {verdict.reason}", worst, telling
            wanted = format_for(k, rank, kept)
            if not k.is_contiguous(memory_format=wanted):
                layout = "a contiguous result" if wanted == torch.contiguous_format else str(wanted).removeprefix("torch.")
                return f"{name}: strides {k.stride()}, the fake promises {layout}", worst, telling
            if name in known.quantised:
                telling = telling or known.quantised[name].informative()
            elif name not in (self.chosen or ()):
                telling = telling or informative(y, o, longest=n, spread=spread)
                if self.problem.counted:
                    pools.setdefault(name, Pool()).add(k, y, o, spread)
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
            results = outputs_of(self.function(*args))
            result = results[position]
            assert result is not None
            return self._values_of(name, result, y, o, results)[0]

        o = o.double() if k.is_floating_point() else o
        return diagnose(k.cpu(), y, o, inputs=tensors, longest=n, reference=again)
