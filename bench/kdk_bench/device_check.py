"""`make device-check`: one command on a machine with a GPU, a TPU or a Trainium, at most five minutes, nothing from the network.

Three phases share the time: the check on the device; what the simulators say of the same inputs, beside the device's answers;
the race against eager, torch.compile and installed peers. What did not fit is listed as not done. Everything is written into one
folder: check.json (kdk.check/1, for `kdk evidence add`), bench.json (kdk.bench/1), device-check.json (kdk.device-check/1) and
index.html.

Everything that touches the device runs in processes of its own: a TPU lets in one process at a time, and a kernel may take its
process with it. --dry-run walks the same way with a handful of cases on the simulators, in this process.

Exit codes: 0 everything was done and holds, 1 something does not hold, 2 usage or a package is missing, 3 there is no device, or
something was not done.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

BUDGET = 300.0  # seconds, of which the last are for writing the report
ENDS = {"find": 0.25, "check": 0.45, "compare": 0.7, "bench": 0.92}
"""When a phase must have ended, as a share of the budget. What one leaves, the next has."""
ROW_SECONDS, RACE_SECONDS = 60.0, 1.0  # a row or a race that takes longer is given up; of timing in a race
RACE_ELEMENTS = 2**24  # of a race's largest tensor: what is checked in float64 on the CPU within seconds
SMALL = 64  # of the dry run's race
MOST_JOBS = 8  # processes on one GPU: each holds a context of some hundred MB
NEEDS = ("torch", "numpy", "click", "rich", "packaging", "platformdirs", "jinja2")
HOLDS, DOES_NOT_HOLD, USAGE, UNDETERMINED = 0, 1, 2, 3


@dataclass(frozen=True)
class Device:
    """device: as torch calls it. target: the chip. implementation: the kernel language that is native to it."""

    device: str
    target: str
    implementation: str


@dataclass
class Report:
    """What came out. not_done: (phase, what, why)."""

    devices: list[Device]
    dry: bool
    checked: list[Any] = field(default_factory=list)
    compared: list[Any] = field(default_factory=list)
    raced: list[Any] = field(default_factory=list)
    not_done: list[tuple[str, str, str]] = field(default_factory=list)


# ---- in the processes that touch the device ---------------------------------------------------------------------------


def begin() -> None:
    """In a worker. PyTorch/XLA's devices are there for who imports it."""
    import torch

    torch.set_num_threads(1)
    if os.environ.get("PJRT_DEVICE") and importlib.util.find_spec("torch_xla"):
        importlib.import_module("torch_xla")


def begin_race() -> None:
    """Of the timing: alone on the machine, with all of its cores for the right answers."""
    import torch

    from kdk_bench.benchmarking import measuring

    begin()
    torch.set_num_threads(os.cpu_count() or 1)
    measuring.DEVICE_ELEMENTS = min(measuring.DEVICE_ELEMENTS, RACE_ELEMENTS)


def find(_: None) -> list[Device]:
    """The first device of every kind of chip that is here."""
    import torch

    import kdk.ops  # noqa: F401
    from kdk.backends import LANGUAGES
    from kdk.platforms import platform
    from kdk_bench.places import local_targets

    return [
        Device(device, target, language.name)
        for target, device in local_targets().items()
        for language in LANGUAGES.values()
        if platform(torch.device(device).type) in language.platforms
    ]


def or_die(results: list[Any]) -> list[Any]:
    """The results, unless the device no longer answers: after an illegal access every later call of this process would fail, too,
    and a new process has to go on."""
    import torch

    try:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    except Exception as error:
        print(f"the device no longer answers: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    return results


def check(row: Any, case: str) -> list[Any]:
    """Every case of the quick tier, or the one of this name."""
    from kdk_bench import runner

    return or_die(runner.work(row, runner.Plan((), case=case)))


def compare(row: Any, cases: int) -> list[Any]:
    """The first cases of the quick tier, simulated and on the device."""
    from kdk_bench.device_comparison import compare_row

    return or_die(compare_row(row, cases))


@dataclass(frozen=True)
class Heat:
    """A race to be run: the operator's first case. small: no size above SMALL."""

    op: str
    direction: str
    dtype: str
    device: str
    target: str
    small: bool = False

    def __str__(self) -> str:
        return f"{self.op}.{self.direction} {self.dtype} on {self.target}"


def race(heat: Heat, seconds: float) -> list[Any]:
    """Every contender's entry."""
    import torch

    import kdk.ops  # noqa: F401
    from kdk_bench.benchmarking.measuring import Race, case_named, measure

    case = case_named(heat.op, "")[0]
    if heat.small:
        case = replace(case, name="small", sizes={letter: min(size, SMALL) for letter, size in case.sizes.items()})
    found = Race(heat.op, heat.direction, heat.dtype, case, torch.device(heat.device), heat.target)
    return or_die(measure(found, seconds=seconds))


# ---- the phases -------------------------------------------------------------------------------------------------------


Ended = tuple[Any, Any]


Begin = Callable[[], None]
Work = Callable[[Any], Any]


def in_processes(starting: Begin, work: Work, tasks: Sequence[Any], jobs: int, until: float) -> Iterator[Ended]:
    """(task, result, or in its place what became of it) of every task, until the time is up."""
    from kdk_bench.workers import each

    yield from each(starting, work, tasks, jobs=jobs, limit=ROW_SECONDS, until=until)


def here(starting: Begin, work: Work, tasks: Sequence[Any], jobs: int, until: float) -> Iterator[Ended]:
    """The same in this process, which cannot end a task that has begun."""
    from kdk_bench.workers import LATE

    for task in tasks:
        yield task, work(task) if time.monotonic() < until else LATE


def rows_for(devices: Sequence[Device], dry: bool) -> list[Any]:
    """Rows of the kernels, one dtype of every operator and direction before the second of any."""
    import kdk.ops  # noqa: F401
    from kdk.registry import OPERATORS
    from kdk_bench.expectation import Row

    rounds: dict[int, list[Row]] = {}
    for d in devices:
        for name in ["rms_norm"] if dry else OPERATORS:
            op = OPERATORS[name].op
            directions = [w for w in ("forward", "backward") if op.function(w) is not None]
            for direction in directions[:1] if dry else directions:
                for turn, dtype in enumerate(op.dtypes[:1] if dry else op.dtypes):
                    rounds.setdefault(turn, []).append(Row(name, direction, d.implementation, d.target, dtype))
    return [row for turn in sorted(rounds) for row in rounds[turn]]


def heats_for(devices: Sequence[Device], dry: bool) -> list[Heat]:
    """A race of every operator's forward, then of every backward."""
    import kdk.ops  # noqa: F401
    from kdk.registry import OPERATORS

    if dry:  # a simulator has no time: the CPU's kernels race
        return [Heat("silu_and_mul", "forward", "float32", "cpu", "cpu", small=True)]
    found = []
    for d in devices:
        for direction in ("forward", "backward"):
            for name, operator in OPERATORS.items():
                if operator.op.function(direction) is not None:
                    dtype = "bfloat16" if "bfloat16" in operator.op.dtypes else operator.op.dtypes[0]
                    found.append(Heat(name, direction, dtype, d.device, d.target))
    return found


def run(report: Report, started: float, budget: float, jobs: int) -> None:
    """All phases, into the report."""
    from kdk_bench import runner
    from kdk_bench.workers import DIED, HUNG, LATE

    phase = here if report.dry else in_processes
    lost = {
        DIED: "its process died (a crash, or the device no longer answered)",
        HUNG: f"no end after {ROW_SECONDS:g} s",
        LATE: "the time was up before it ended",
    }

    def until(name: str) -> float:
        return started + budget * ENDS[name]

    def say(name: str, tasks: Sequence[Any]) -> None:
        print(f"{name}: {len(tasks)} rows, until {budget * ENDS[name]:.0f} s", file=sys.stderr, flush=True)

    rows = rows_for(report.devices, report.dry)
    say("check", rows)
    results = dict(phase(begin, functools.partial(check, case="plain" if report.dry else ""), rows, jobs, until("check")))
    for row in rows:
        got = results[row]
        if isinstance(got, str):
            report.not_done.append(("check", str(row), lost[got]))
            got = [runner.lost(row, got, runner.Plan((), limit=ROW_SECONDS))]
        report.checked += got
    say("compare", rows)
    compared = phase(begin, functools.partial(compare, cases=1 if report.dry else 0), rows, jobs, until("compare"))
    for row, got in compared:
        if isinstance(got, str):
            report.not_done.append(("compare", str(row), lost[got]))
        else:
            report.compared += got
    heats = heats_for(report.devices, report.dry)
    say("bench", heats)
    racing = functools.partial(race, seconds=0.1 if report.dry else RACE_SECONDS)
    for heat, got in phase(begin_race, racing, heats, 1, until("bench")):
        if isinstance(got, str):
            report.not_done.append(("bench", str(heat), lost[got]))
        else:
            report.raced += got


def exit_code(report: Report) -> int:
    """1 where something does not hold, 3 where something was not done or could not be known."""
    from kdk_bench import report as checks
    from kdk_bench.benchmarking import reporting
    from kdk_bench.device_comparison import BROKEN, UNKNOWN

    outcomes = {c.outcome for c in report.compared}
    codes = {checks.exit_code(report.checked), DOES_NOT_HOLD if outcomes & BROKEN else HOLDS}
    codes |= {UNDETERMINED if report.not_done or UNKNOWN in outcomes else HOLDS}
    codes |= {reporting.exit_code(report.raced)} if report.raced else set()
    return DOES_NOT_HOLD if DOES_NOT_HOLD in codes else max(codes)


# ---- the command ------------------------------------------------------------------------------------------------------


def simulated_devices() -> list[Device]:
    """For the dry run: the first chip of every language whose simulator works here."""
    from kdk.backends import LANGUAGES

    there = [language for language in LANGUAGES.values() if not language.module("launch").missing("cpu")]
    return [Device("cpu", language.targets[0], language.name) for language in there]


def found_devices(started: float, budget: float) -> tuple[list[Device], str]:
    """The devices here, and why there are none."""
    got = dict(in_processes(begin, find, [None], 1, started + budget * ENDS["find"]))[None]
    if isinstance(got, str):
        return [], f"the process that looked for a device {got}: `kdk env` says what is here"
    return got, "" if got else "torch finds no GPU, TPU or Trainium that kdk has kernels for: `kdk env` says what is here"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(prog="make device-check", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="a handful of cases on the simulators; no device is needed")
    parser.add_argument("--out", default="device-check", metavar="DIR", help="where the reports go (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="at most, for all (default: %(default)s)")
    given = parser.parse_args(arguments)
    started = time.monotonic()
    if not 10 <= given.budget <= BUDGET:  # nan, too
        parser.error(f"--budget {given.budget:g}: from 10 to {BUDGET:g} seconds")
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        way_out = f"pip install {' '.join(missing)}"
        print(f"device-check needs {', '.join(NEEDS)}; not installed: {', '.join(missing)}. {way_out}", file=sys.stderr)
        return USAGE
    try:
        Path(given.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {given.out}: {error.strerror}; name a folder that can be written")
    if given.dry_run:
        devices, why = simulated_devices(), "no simulator works here: `kdk env` says what they need"
    else:
        devices, why = found_devices(started, given.budget)
    if not devices:
        print(f"device-check: {why}. Without a device: make device-check DRY=1", file=sys.stderr)
        return UNDETERMINED
    report = Report(devices, given.dry_run)
    one_process = {d.implementation for d in devices} != {"triton"}  # a TPU and a Trainium belong to one process at a time
    run(report, started, given.budget, 1 if one_process else min(MOST_JOBS, os.cpu_count() or 1))
    from kdk_bench.device_page import write

    code = exit_code(report)
    write(report, Path(given.out), time.monotonic() - started, given.budget, code)
    return code


if __name__ == "__main__":
    sys.exit(main())
