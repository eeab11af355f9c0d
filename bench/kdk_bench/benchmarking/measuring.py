"""Measure one case of an operator on one device: everyone is checked on the inputs of the race first, then they take turns."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from kdk.cases import Case
from kdk.errors import KdkError, UsageError
from kdk.op import Op
from kdk.registry import OPERATORS
from kdk_bench.benchmarking import memory, timing
from kdk_bench.benchmarking.contenders import EAGER, Contender, NotTaken, contenders, gradient
from kdk_bench.benchmarking.statistics import paired_ratio, percentiles
from kdk_bench.check import Expectation, Row
from kdk_bench.declared_cases import cases_of
from kdk_bench.drawing import draw
from kdk_bench.generate import Problem, fit, model_problem
from kdk_bench.work import least_bytes, least_flops

functorch_config.donated_buffer = False  # else a compiled backward refuses to run twice

PEAKS = json.loads((Path(__file__).parent / "peaks.json").read_text())["devices"]
# What is checked in float64 on the CPU, several times, and has to end: elements of the largest tensor, and operations.
CPU_ELEMENTS, DEVICE_ELEMENTS, MOST_FLOPS = 2**22, 2**26, 2e10
MEASURED, WRONG, REFUSED, FAILED, ABSENT = "measured", "wrong", "refused", "failed", "absent"


@dataclass(frozen=True)
class Heat:
    """One race. sizes: as run, which is the case cut to what can be checked; cut: whether it was. operators: of a block of a model,
    those that `kdk.patch` puts into it."""

    op: str
    direction: str
    dtype: str
    target: str
    case: str
    sizes: Mapping[str, int]
    cut: bool
    operators: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """How one contender did. Times in seconds per call; bytes and flops are the algorithm's minimum, the same for all."""

    heat: Heat
    contender: str
    implementation: str
    outcome: str
    reason: str = ""
    cold: float | None = None
    samples: tuple[float, ...] = ()
    times: Mapping[str, float | None] = field(default_factory=dict)
    ratio: Mapping[str, Any] | None = None
    peak_memory: int | None = None
    rates: Mapping[str, float | None] = field(default_factory=dict)


def cut(op: Op, case: Case, device: torch.device) -> dict[str, int]:
    """The case's sizes, its first letter (tokens) halved until the case can be checked in time."""
    return cut_to(op, case, CPU_ELEMENTS if device.type == "cpu" else DEVICE_ELEMENTS, MOST_FLOPS)


def cut_to(op: Op, case: Case, limit: int, most_flops: float) -> dict[str, int]:
    """The case's sizes, its first letter halved until its largest tensor and its operations are within limits, or it is 1."""
    cases, sizes = cases_of(op), dict(case.sizes)
    first = next(iter(cases.dims))
    while sizes[first] > 1 and (_elements(op, sizes) > limit or (least_flops(op, "forward", sizes) or 0) > most_flops):
        sizes = fit({**sizes, first: max(1, sizes[first] // 2)}, cases.dims)
    return sizes


def _elements(op: Op, sizes: Mapping[str, int]) -> int:
    tokens = (text.replace("*", "").replace("|1", "").split() for text in op.shapes.values())
    return max(math.prod(int(t) if t.isdigit() else sizes[t] for t in text) for text in tokens)


def too_large(op: Op, sizes: Mapping[str, int], limit: int, most_flops: float) -> bool:
    """Whether sizes that `cut_to` left are beyond its limits all the same."""
    return _elements(op, sizes) > limit or (least_flops(op, "forward", sizes) or 0) > most_flops


def case_named(name: str, case: str) -> list[Case]:
    """The case of this name; the primary one for "", every one for "all"."""
    models = cases_of(OPERATORS[name].op).models
    found = [models[0]] if not case else [m for m in models if case in ("all", m.name)]
    if not found:
        raise UsageError("KDK-CASE", f"{name} has no case of this name", value=repr(case), limit=", ".join(m.name for m in models))
    return found


def problem_of(op: Op, case: Case, sizes: Mapping[str, int]) -> Problem:
    starred = {t[1:] for text in op.shapes.values() for t in text.split() if t.startswith("*")}
    return model_problem(op, cases_of(op), case, sizes, {letter: (sizes[letter],) for letter in starred})


class Race:
    """Inputs, right answers and contenders of one heat."""

    def __init__(self, name: str, direction: str, dtype: str, case: Case, device: torch.device, target: str) -> None:
        self.operator, self.device = OPERATORS[name], device
        op = self.op = self.operator.op
        sizes = cut(op, case, device)
        self.heat = Heat(name, direction, dtype, target, case.name, sizes, sizes != dict(case.sizes))
        self.problem = problem_of(op, case, sizes)
        self.expected = Expectation(self.operator, Row(name, direction, "bench", target, dtype), self.problem, 0)
        self.wait = timing.synchroniser(device)
        working = getattr(torch, dtype)
        inputs = draw(op, op.tensors, self.problem, working, 0)
        given = [inputs.tensors.get(n, self.problem.scalars.get(n)) for n in op.arguments]
        self.args = tuple([a.to(device) if isinstance(a, Tensor) else a for a in given])
        self.grads = None
        if direction == "backward":
            drawn = draw(op, op.outputs, self.problem, working, 0, prefix="gradient of ").tensors
            self.grads = [None if (g := drawn.get(n)) is None else g.to(device) for n in op.outputs]

    def runner(self, contender: Contender) -> Callable[[], Any]:
        """What is timed: a forward without gradients, or a backward alone."""
        if self.grads is None:

            def forward() -> Any:
                with torch.no_grad():
                    return contender.function(*self.args)

            return forward
        wanted = [list(self.op.arguments).index(n) for n in self.op.uses]
        return gradient(contender.function, self.args, wanted, list(self.grads))

    def wrong(self, run: Callable[[], Any]) -> str:
        """Why the results are wrong, or ""; judged as `kdk check` judges, on the inputs that are timed."""
        results = run()
        results = results if isinstance(results, tuple) else (results,)
        count = len(self.op.outputs) if self.grads is None else len(self.op.uses)
        got = [None if t is None else t.detach().cpu().contiguous() for t in results[:count]]
        # What others do not give, the tensors saved for backward, is no part of the race.
        reason, _, _ = self.expected.judge((*got, *self.expected.reference[count:]), {})
        return reason

    def work(self) -> tuple[int, int | None]:
        """(bytes, floating-point operations) of the algorithm, see `kdk_bench.work`."""
        direction = self.heat.direction
        unique = least_bytes(self.op, direction, self.expected.call.args, self.expected.reference)
        return unique, least_flops(self.op, direction, self.heat.sizes)


def measure(race: Race, *, seconds: float, against: tuple[str, ...] = (), price: float | None = None) -> list[Entry]:
    """Everyone's entry. against: names of contenders to keep beside kdk's and the eager reference; empty: all.

    price: of an hour of the device, from which the cost of a million calls follows.
    """
    entries: dict[str, Entry] = {}
    runs: dict[str, Callable[[], Any]] = {}
    colds: dict[str, float] = {}
    for contender in contenders(race.heat.op, race.device, race.heat.direction):
        if against and contender.name not in (EAGER, *against) and not contender.implementation:
            continue
        entry = Entry(race.heat, contender.name, contender.implementation, ABSENT, contender.absent)
        if not contender.absent:
            entry = _admit(race, contender, entry, runs, colds)
        entries[contender.name] = entry
    if not runs:
        return list(entries.values())
    timed = timing.take_turns(runs, colds, race.wait, seconds)
    for name, found in timed.items():
        entries[name] = _timed(race, entries[name], found, timed.get(EAGER), runs[name], price)
    return list(entries.values())


def _admit(race: Race, contender: Contender, entry: Entry, runs: dict[str, Any], colds: dict[str, float]) -> Entry:
    """Run a contender once, cold, and check it; it starts only if it is right."""
    try:
        start, run = time.perf_counter(), race.runner(contender)
        run()
        race.wait()
        colds[contender.name] = time.perf_counter() - start
        reason = race.wrong(run)
    except NotTaken as error:
        return replace(entry, outcome=REFUSED, reason=str(error))
    except KdkError as error:
        return replace(entry, outcome=REFUSED, reason=str(error))
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        return replace(entry, outcome=FAILED, reason=f"{type(error).__name__}: {text}")
    if reason:
        return replace(entry, outcome=WRONG, reason=reason)
    runs[contender.name] = run
    return replace(entry, outcome=MEASURED)


def _timed(
    race: Race, entry: Entry, found: timing.Timing, eager: timing.Timing | None, run: Callable[[], Any], price: float | None
) -> Entry:
    times = percentiles(found.samples)
    unique, flops = race.work()
    p50 = times["p50"]
    assert p50 is not None
    bandwidth, rate = unique / p50, flops / p50 if flops else None
    peaks = _peaks(race.device)
    matrix = "bfloat16" if race.heat.dtype in ("bfloat16", "float16") else race.heat.dtype
    rates = {
        "bytes": float(unique),
        "flops": float(flops) if flops else None,
        "bandwidth": bandwidth,
        "flop_rate": rate,
        "share_of_bandwidth": bandwidth / peaks["bytes"] if peaks else None,
        "share_of_flop_rate": rate / peaks[matrix] if peaks and rate and matrix in peaks else None,
        "cost_per_million_calls": price * p50 / 3600 * 1e6 if price is not None else None,
    }
    ratio = None
    if eager is not None:
        r = paired_ratio(found.samples, eager.samples)
        ratio = {"to": EAGER, "value": r.value, "low": r.low, "high": r.high}
    return replace(
        entry,
        cold=found.cold,
        samples=tuple(found.samples),
        times=times,
        ratio=ratio,
        rates=rates,
        peak_memory=memory.peak(run, race.device),
    )


def _peaks(device: torch.device) -> dict[str, float] | None:
    if device.type != "cuda":
        return None
    return PEAKS.get(torch.cuda.get_device_name(device))
