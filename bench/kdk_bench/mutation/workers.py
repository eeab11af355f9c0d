"""Processes that run mutants. They live on from mutant to mutant; one that hangs or dies is replaced, and killed the mutant."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from kdk_bench.mutation.mutants import Mutant
from kdk_bench.mutation.trial import Step, Trial, run_mutant, steps
from kdk_bench.mutation.units import Unit

LEAST_LIMIT = 20.0  # seconds of processor time that every mutant has: the same mutant hangs on a busy machine and an idle one
SLOWER = 5  # times as long as the unchanged kernel, and a mutant counts as hanging
WAITING = 30  # times as long on the clock, for a mutant that hangs without computing


@dataclass
class Work:
    """What is to be done for one unit. original: (file, text) of the unchanged kernel. wanted: mutants that count."""

    unit: Unit
    original: tuple[str, str]
    mutants: list[Mutant]
    wanted: int
    baseline: Trial | None = None
    trials: list[tuple[Mutant, Trial]] = field(default_factory=list)
    kills: Counter[Step] = field(default_factory=Counter)

    def order(self) -> list[Step]:
        """The cases that killed most come first: a mutant mostly dies at the first one."""
        return sorted(steps(self.unit), key=lambda step: -self.kills[step])

    def finished(self) -> bool:
        if self.baseline is None:
            return False
        return bool(self.baseline.kill) or not self.mutants or self.counting() >= self.wanted

    def counting(self) -> int:
        return sum(t.kill != "stillborn" for _, t in self.trials)

    def next(self) -> tuple[Unit, str, str, list[Step]]:
        file, text = self.original if self.baseline is None else (self.mutants[0].module, self.mutants[0].source)
        return self.unit, file, text, self.order()

    def limit(self) -> float:
        """Seconds of processor time for the next mutant."""
        return 600.0 if self.baseline is None else max(LEAST_LIMIT, SLOWER * self.baseline.seconds)

    def done(self, trial: Trial) -> None:
        if self.baseline is None:
            self.baseline = trial
            return
        self.trials.append((self.mutants.pop(0), trial))
        if trial.kill in ("numerics", "sanitizer", "crash") and trial.step is not None:
            self.kills[trial.step] += 1


def _serve(connection: Connection, seed: int) -> None:
    """A worker's life: its share of the cores is one."""
    import resource

    import torch

    import kdk.ops  # noqa: F401  (registers the operators)

    torch.set_num_threads(1)
    while True:
        limit, task = connection.recv()
        # Past it the system ends the process, also where it is deep in compiled code.
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + limit) + 1, resource.RLIM_INFINITY))
        unit, changed, source, order = task
        connection.send(run_mutant(unit, changed, source, order, seed))


class _Worker:
    def __init__(self, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, seed), daemon=True)
        self.process.start()
        theirs.close()
        self.work: Work | None = None
        self.deadline = 0.0

    def begin(self, work: Work) -> None:
        self.work = work
        self.connection.send((work.limit(), work.next()))
        self.deadline = time.monotonic() + WAITING * work.limit()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def run(works: list[Work], jobs: int, seed: int, progress: Callable[[Work, Trial], None]) -> None:
    """Fill in the trials of every unit. The mutants of a unit run in turn, so the outcome is the same for any number of jobs."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # read when a worker imports its libraries
        os.environ.setdefault(variable, "1")
    waiting = list(works)
    workers = [_Worker(seed) for _ in range(min(jobs, len(works)))]
    try:
        for worker in workers:
            worker.begin(waiting.pop(0))
        while any(w.work for w in workers):
            for worker, trial in _answers(workers):
                work = worker.work
                assert work is not None
                work.done(trial)
                progress(work, trial)
                if not worker.process.is_alive() or trial.reason.startswith("no answer"):
                    worker.end()
                    workers[workers.index(worker)] = worker = _Worker(seed)
                worker.work = None
                if not work.finished():
                    worker.begin(work)
                elif waiting:
                    worker.begin(waiting.pop(0))
    finally:
        for worker in workers:
            worker.end()


def _answers(workers: list[_Worker]) -> Iterator[tuple[_Worker, Trial]]:
    """Wait for the next answers, for a worker's death or for its deadline."""
    busy = [w for w in workers if w.work]
    left = min(w.deadline for w in busy) - time.monotonic()
    ready: list[Any] = wait([w.connection for w in busy], max(left, 0))
    for worker in busy:
        if worker.connection in ready:
            try:
                yield worker, worker.connection.recv()
            except EOFError:
                yield worker, Trial("crash", None, "no answer: the process ran out of its time, or died")
        elif worker.deadline <= time.monotonic():
            yield worker, Trial("crash", None, "no answer: it waits for ever")
