"""Processes that run mutants. They live on from mutant to mutant; one that hangs or dies is replaced, and killed the mutant."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from kdk_bench.mutation.mutants import Mutant
from kdk_bench.mutation.trial import Step, Trial, allow, run_mutant, run_original, steps, uncounted
from kdk_bench.mutation.units import Unit, files, sharing

KILLS = ("numerics", "sanitizer", "crash")
LEAST_LIMIT = 15.0  # seconds of processor time that every case has: the same mutant hangs on a busy machine and an idle one
SLOWER = 5  # times as long as the unchanged kernel, and a mutant counts as hanging
CHEAPEST = 0.2  # seconds: what drawing, judging and diagnosing take, however small a case is
LONGEST = 600.0  # seconds of processor time for what has no limit by case
IDLE = 60.0  # seconds on the clock in which a mutant that does not compute at all counts as hanging


@dataclass
class Work:
    """What is to be done for one unit. wanted: how many mutants must count; none: only the unchanged kernel runs."""

    unit: Unit
    mutants: list[Mutant]
    wanted: int
    baseline: Trial | None = None
    trials: list[tuple[Mutant, Trial]] = field(default_factory=list)
    kills: Counter[Step] = field(default_factory=Counter)
    sharing: list[Work] = field(default_factory=list)  # of the other units that run a file of this one
    asked: int = 0  # how many of them the first mutant has survived, itself included

    def judges(self) -> list[Work]:
        """Whose cases may kill the first mutant: a fault in shared code is found when any of its users' checks fails."""
        return [self, *(other for other in self.sharing if self.mutants[0].module in files(other.unit))]

    def cost(self, step: Step) -> float:
        return max(CHEAPEST, self.baseline.costs.get(step[1], 0.0) if self.baseline else 0.0)

    def order(self) -> list[Step]:
        """The cases that kill most in a second come first: a mutant mostly dies at the first one. Of a single element last, as in
        `kdk check`: what is wrong there says little about the cause."""
        return sorted(steps(self.unit), key=lambda s: (s[1] in uncounted(self.unit), -(1 + self.kills[s]) / self.cost(s)))

    def finished(self) -> bool:
        if self.baseline is None:
            return False
        return bool(self.baseline.kill) or not self.mutants or self.counting() >= self.wanted

    def counting(self) -> int:
        return sum(t.kill != "stillborn" for _, t in self.trials)

    def next(self) -> Callable[..., Trial]:
        """What a worker runs, given the seed."""
        if self.baseline is None:
            return functools.partial(run_original, self.unit, bool(sharing([self.unit])))
        judge = self.judges()[self.asked]
        limits = {name: max(LEAST_LIMIT, SLOWER * judge.cost((dtype, name))) for dtype, name in steps(judge.unit)}
        return functools.partial(run_mutant, judge.unit, self.mutants[0].module, self.mutants[0].source, judge.order(), limits=limits)

    def done(self, trial: Trial) -> bool:
        """Take what a worker answers. Whether that settles a mutant."""
        if self.baseline is None:
            self.baseline = trial
            return False
        judges = self.judges()
        killed = trial.kill in KILLS
        if (trial.kill == "stillborn" and self.asked == 0) or killed or self.asked + 1 == len(judges):
            by = str(judges[self.asked].unit) if killed and self.asked else ""
            settled = dataclasses.replace(trial, by=by) if killed or self.asked == 0 else Trial("", seconds=trial.seconds)
            self.trials.append((self.mutants.pop(0), settled))
            judges[self.asked].count(trial)
            self.asked = 0
            return True
        self.asked += 1
        return False

    def count(self, trial: Trial) -> None:
        """Which case killed: `order` has it earlier from now on."""
        if trial.kill in KILLS and trial.step is not None:
            self.kills[trial.step] += 1


def _end_if_idle(busy: threading.Event, idle: float) -> None:
    """End the process when it waits for what never comes: a semaphore, a barrier, another thread."""
    while True:
        busy.wait()
        before = time.process_time()
        for _ in range(10):  # in steps: a new mutant starts anew
            time.sleep(idle / 10)
            if not busy.is_set():
                break
        else:
            if time.process_time() - before < idle / 100:
                os._exit(1)


def _serve(connection: Connection, seed: int, idle: float) -> None:
    """A worker's life: its share of the cores is one."""
    import torch

    import kdk.ops  # noqa: F401  (registers the operators)

    torch.set_num_threads(1)
    busy = threading.Event()
    threading.Thread(target=_end_if_idle, args=(busy, idle), daemon=True).start()
    while True:
        function = connection.recv()
        busy.set()
        allow(LONGEST)
        answer = function(seed=seed)
        busy.clear()
        connection.send(answer)


class _Worker:
    def __init__(self, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, seed, IDLE), daemon=True)
        self.process.start()
        theirs.close()
        self.work: Work | None = None

    def begin(self, work: Work) -> None:
        self.work = work
        self.connection.send(work.next())

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def run(works: list[Work], jobs: int, seed: int, progress: Callable[[Work, bool], None]) -> None:
    """Fill in the trials of every unit. The mutants of a unit run in turn, so the outcome is the same for any number of jobs."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # read when a worker imports its libraries
        os.environ.setdefault(variable, "1")
    workers = [_Worker(seed) for _ in range(min(jobs, len(works)))]
    try:
        _run_until(lambda work: work.baseline is not None, works, workers, seed, progress)
        _share_out(works)
        longest_first = sorted(works, key=lambda work: -work.baseline.seconds if work.baseline else 0.0)  # no core waits in the end
        _run_until(Work.finished, longest_first, workers, seed, progress)
    finally:
        for worker in workers:
            worker.end()


def _share_out(works: list[Work]) -> None:
    """Kernels share code. What an operator never runs, and another does, is the other's: its mutants are planted there."""
    ran = {id(work): work.baseline.lines for work in works if work.baseline is not None}
    for work in works:
        others = frozenset().union(*(lines for key, lines in ran.items() if key != id(work)))
        foreign = others - ran[id(work)]
        work.mutants = [m for m in work.mutants if (m.module, m.line) not in foreign]


def _run_until(
    done: Callable[[Work], bool], works: list[Work], workers: list[_Worker], seed: int, progress: Callable[[Work, bool], None]
) -> None:
    waiting = [work for work in works if not done(work)]
    for worker in workers:
        if waiting:
            worker.begin(waiting.pop(0))
    while any(w.work for w in workers):
        for worker, trial in _answers(workers):
            work = worker.work
            assert work is not None
            progress(work, work.done(trial))
            if not worker.process.is_alive() or trial.reason.startswith("no answer"):
                worker.end()
                workers[workers.index(worker)] = worker = _Worker(seed)
            worker.work = None
            if not done(work):
                worker.begin(work)
            elif waiting:
                worker.begin(waiting.pop(0))


def _answers(workers: list[_Worker]) -> Iterator[tuple[_Worker, Trial]]:
    """Wait for the next answers, or for a worker's death."""
    busy = [w for w in workers if w.work]
    ready: list[Any] = wait([w.connection for w in busy])
    for worker in busy:
        if worker.connection in ready:
            try:
                yield worker, worker.connection.recv()
            except EOFError:
                yield worker, Trial("crash", None, "no answer: the process ran out of its time, waits for ever, or died")
