"""The search: every legal set of launch parameters of one kernel, on one case, by what it costs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kdk import tuning
from kdk.backends import LANGUAGES, TARGETS, one_line
from kdk.cases import Case
from kdk.dispatch import Kernel, kernel_file, load_kernel, refusal
from kdk.indices import Indices
from kdk.registry import OPERATORS
from kdk_bench.benchmarking import timing
from kdk_bench.benchmarking.measuring import Heat, Race
from kdk_bench.benchmarking.statistics import percentiles
from kdk_bench.compiling.described import arguments
from kdk_bench.modelled.rows import Cost, model_of
from kdk_bench.records import environment, today

TUNED, KEPT, REFUSED, FAILED, UNKNOWN = "tuned", "kept", "refused", "failed", "unknown"
LEAST_GAIN = 0.01  # of the time: less is not recorded, the kernel's own choice stands
SECONDS = 0.2  # of timing for each candidate on a device
Costs = Callable[[Sequence[Mapping[str, Any]]], list[Cost]]
"""From launch parameters to their costs, in order; {} is the kernel's own choice."""


@dataclass(frozen=True)
class Tuned:
    """What came of one kernel, case, dtype and chip.

    outcome: tuned, to `parameters`; kept: the kernel's own choice is the best to LEAST_GAIN, or nothing can be chosen; refused, by
    `supports`; failed; unknown. tried: all candidates with their costs. alone: the kernel's time over the reference's.
    """

    heat: Heat
    outcome: str
    reason: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    before: Cost = field(default_factory=Cost)
    after: Cost = field(default_factory=Cost)
    tried: tuple[tuple[Mapping[str, Any], Cost], ...] = ()
    alone: float | None = None
    no_alone: str = ""

    @property
    def ratio(self) -> float | None:
        """Of the times, after over before."""
        if self.before.seconds is None or self.after.seconds is None:
            return None
        return self.after.seconds / self.before.seconds

    def parts(self) -> dict[str, Any]:
        """The parts of its entry in the tuning file. Not tuned: no launch parameters, whatever stood there."""
        provenance = {"evidence": self.after.evidence, "environment": environment(), "date": today()}
        found: dict[str, Any] = {"launch": None}
        if self.outcome == TUNED:
            unit = "s" if self.ratio is not None else "compiled resources"
            costs = {"before": self.before.seconds or self.before.text, "after": self.after.seconds or self.after.text}
            found["launch"] = {"parameters": dict(self.parameters), "case": self.heat.case, **costs, "unit": unit, "ratio": self.ratio}
            found["launch"] |= provenance
        if self.alone is not None:
            found["alone"] = {"winner": tuning.winner(self.alone), "ratio": self.alone, "case": self.heat.case, **provenance}
        return found

    def as_json(self) -> dict[str, Any]:
        """A result of `kdk.tune/1`."""
        heat = self.heat
        known = self.outcome in (TUNED, KEPT)
        return {
            "op": heat.op, "direction": heat.direction, "dtype": heat.dtype, "target": heat.target, "case": heat.case,
            "sizes": dict(heat.sizes), "outcome": self.outcome, "reason": self.reason, "parameters": dict(self.parameters),
            "before_seconds": self.before.seconds, "before": self.before.text,
            "after_seconds": self.after.seconds, "after": self.after.text, "ratio": self.ratio,
            "alone": self.alone, "alone_unknown": self.no_alone,
            "tried": [{"parameters": dict(p), "seconds": c.seconds, "cost": c.text, "reason": c.why_not} for p, c in self.tried],
            "evidence": self.after.evidence if known else "", "environment": environment(), "date": today(),
        }  # fmt: skip


def candidates(kernel: Kernel, target: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Every set of legal values that the kernel takes on such arguments."""
    names = list(kernel.tunable)
    every = [dict(zip(names, values)) for values in itertools.product(*kernel.tunable.values())] if names else []
    return [parameters for parameters in every if not kernel.refuses(target, parameters, args)]


def tune(heat: Heat, case: Case, model: Any, device: str) -> Tuned:
    """Search one kernel. model: of the chip's language. device: the chip as torch has it here, "" where it is not."""
    op, language = OPERATORS[heat.op].op, LANGUAGES[TARGETS[heat.target]]
    if kernel_file(op, language.name, heat.direction) is None:
        return Tuned(heat, REFUSED, f"{op.name} has no {language.name} kernel for its {heat.direction}")
    lacks = None if device else language.module("compile").missing()
    if lacks:
        return Tuned(heat, UNKNOWN, lacks)
    language.module("launch").prepare()
    kernel = load_kernel(op, language.name, heat.direction)
    assert kernel is not None
    try:
        race = Race(heat.op, heat.direction, heat.dtype, case, torch.device(device), heat.target) if device else None
        args = race.expected.call.args if race else arguments(op, heat.direction, case, heat.dtype)
        given = Indices(op, heat.direction).narrowed(args)
        reason = refusal(language, heat.target, kernel)(given)
        if reason:
            return Tuned(heat, REFUSED, reason)
        own = kernel.arguments(*given)
        if race:
            return _searched(race.heat, kernel, own, functools.partial(_timed, race, kernel, given), functools.partial(_eager, race))

        def costs(every: Sequence[Mapping[str, Any]]) -> list[Cost]:
            return [model.cost(kernel.configured(parameters), own, heat.target) for parameters in every]

        return _searched(heat, kernel, own, costs, lambda: model.plain(heat, args))
    except Exception as error:  # of the operator's own code
        return Tuned(heat, FAILED, f"{type(error).__name__}: {one_line(error)}")


def _searched(heat: Heat, kernel: Kernel, own: tuple[Any, ...], costs: Costs, plain: Callable[[], Cost]) -> Tuned:
    wanted = candidates(kernel, heat.target, own)
    before, *found = costs([{}, *wanted])
    if before.why_not:
        return Tuned(heat, UNKNOWN, f"the kernel as it is has no cost: {before.why_not}")
    tried = tuple(zip(wanted, found))
    known = [(parameters, cost) for parameters, cost in tried if not cost.why_not]
    parameters, best = min(known, key=lambda pair: pair[1].order, default=({}, before))
    result = Tuned(heat, KEPT, "" if kernel.tunable else "the kernel has no launch parameters", {}, before, before, tried)
    if known and _gains(before, best):
        result = replace(result, outcome=TUNED, parameters=parameters, after=best)
    reference = plain()
    if reference.seconds is None or result.after.seconds is None:
        return replace(result, no_alone=reference.why_not or "the kernel has no time")
    return replace(result, alone=result.after.seconds / reference.seconds)


def _gains(before: Cost, after: Cost) -> bool:
    if before.seconds is not None and after.seconds is not None:
        return after.seconds < before.seconds * (1 - LEAST_GAIN)
    return after.order < before.order


# ---- on a device ---------------------------------------------------------------------------------------------------------


def _timed(race: Race, kernel: Kernel, given: tuple[Any, ...], every: Sequence[Mapping[str, Any]]) -> list[Cost]:
    """Measured costs, all candidates in turns; one whose results are wrong has none."""
    launch = LANGUAGES[TARGETS[race.heat.target]].module("launch")
    moved = kernel.arguments(*[a.to(race.device) if isinstance(a, Tensor) else a for a in given])
    runs: dict[str, Callable[[], Any]] = {}
    wrong: dict[str, str] = {}
    for number, parameters in enumerate(every):
        run = functools.partial(launch.run_on_device, kernel.configured(parameters), moved)
        try:
            results = run()
            race.wait()
            results = results if isinstance(results, tuple) else (results,)
            reason, _, _ = race.expected.judge(tuple([None if t is None else t.cpu() for t in results]), {})
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
        if reason:
            wrong[str(number)] = reason
        else:
            runs[str(number)] = run
    times = timing.take_turns(runs, dict.fromkeys(runs, 0.0), race.wait, SECONDS * len(runs)) if runs else {}
    return [_measured(times.get(str(number)), wrong.get(str(number), "")) for number in range(len(every))]


def _measured(found: timing.Timing | None, wrong: str) -> Cost:
    seconds = percentiles(found.samples)["p50"] if found else None
    if seconds is None:
        return Cost(why_not=wrong or "it was not timed")
    return Cost((seconds,), seconds, f"{seconds * 1e6:.1f} us", "measured")


def _eager(race: Race) -> Cost:
    """The reference, eager, on the same inputs."""
    function = race.op.function(race.heat.direction)
    assert function is not None
    args = [a.to(race.device) if isinstance(a, Tensor) else a for a in race.expected.call.args]
    found = timing.take_turns({"": functools.partial(function, *args)}, {"": 0.0}, race.wait, SECONDS)
    return _measured(found[""], "")


def run(plan: Sequence[tuple[Heat, Case]], directory: str | None, devices: Mapping[str, str], progress: Callable[[], None]) -> list[Tuned]:
    """The result of every heat; chips of one language by one model of it."""
    found: dict[int, Tuned] = {}
    for language in dict.fromkeys(TARGETS[heat.target] for heat, _ in plan):
        mine = [i for i, (heat, _) in enumerate(plan) if TARGETS[heat.target] == language]
        module = model_of(plan[mine[0]][0].target)
        assert module is not None
        with module.Model(directory) as model:
            for i in mine:
                found[i] = tune(*plan[i], model, devices.get(plan[i][0].target, ""))
                progress()
    return [found[i] for i in range(len(plan))]
