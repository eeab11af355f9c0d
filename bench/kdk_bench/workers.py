"""Processes that work on one task at a time, and may die or hang: then the task is lost and nothing else."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from typing import Any, TypeVar

DIED, HUNG, LATE = "died", "hung", "late"
_Task = TypeVar("_Task")
START = 600.0  # seconds for a process to import what it needs, on a machine that does much else


class _Worker:
    """One process: begins, says so, then answers one task after the other."""

    def __init__(self, context: SpawnContext, begin: Callable[[], None], work: Callable[[Any], Any]) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, begin, work), daemon=True)
        self.process.start()
        theirs.close()
        self.task: int | None = None
        self.ready = False
        self.until = time.monotonic() + START

    def give(self, number: int, task: Any, limit: float) -> None:
        self.task, self.until = number, time.monotonic() + limit
        self.connection.send(task)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, begin: Callable[[], None], work: Callable[[Any], Any]) -> None:
    """Answers with what was raised, or None and the result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to everybody; the parent ends its workers
    try:
        begin()
        connection.send((None, None))
        while True:
            connection.send((None, work(connection.recv())))
    except EOFError:
        return
    except Exception as error:
        connection.send((error, None))


def each(
    begin: Callable[[], None],
    work: Callable[[_Task], Any],
    tasks: Sequence[_Task],
    *,
    jobs: int,
    limit: float,
    until: float = math.inf,
) -> Iterator[tuple[_Task, Any]]:
    """(task, its result), in the order in which they end. In place of a result DIED, HUNG after `limit` seconds, or LATE for
    what has not ended, or not begun, at `until` on the clock of time.monotonic.

    begin and work are sent to the processes: functions of a module, or partials of them. What they raise is raised here.
    """
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # read when a worker imports its libraries
        os.environ.setdefault(variable, "1")
    context = multiprocessing.get_context("spawn")
    waiting = list(range(len(tasks)))[::-1]
    workers: list[_Worker] = []
    try:
        while waiting or any(w.task is not None for w in workers):
            while len(workers) < jobs and len(workers) < len(waiting) + sum(w.task is not None for w in workers):
                workers.append(_Worker(context, begin, work))
            for worker in workers:
                if worker.ready and worker.task is None and waiting:
                    number = waiting.pop()
                    worker.give(number, tasks[number], limit)
            first = min([until, *(w.until for w in workers if w.task is not None or not w.ready)])
            readable = wait([w.connection for w in workers if w.task is not None or not w.ready], max(0.0, first - time.monotonic()))
            for worker in list(workers):
                ended = _outcome(worker, worker.connection in readable)
                if ended is None:
                    continue
                if ended in ((DIED,), (HUNG,)):
                    worker.end()
                    workers.remove(worker)
                    if worker.task is None:  # it never began: so will the others
                        if not waiting:
                            continue
                        worker.task = waiting.pop()
                done, worker.task = worker.task, None
                if done is not None:
                    yield tasks[done], ended[0]
            if time.monotonic() >= until:
                for number in [w.task for w in workers if w.task is not None] + waiting[::-1]:
                    yield tasks[number], LATE
                return
    finally:
        for worker in workers:
            worker.end()


def _outcome(worker: _Worker, readable: bool) -> tuple[Any] | None:
    """What became of a worker's task; None: nothing yet, or that it is ready for the first."""
    if readable:
        try:
            error, result = worker.connection.recv()
        except (EOFError, OSError):
            return (DIED,)
        if error is not None:
            raise error
        if not worker.ready:
            worker.ready = True
            return None
        return (result,)
    busy = worker.task is not None or not worker.ready
    return (HUNG,) if busy and time.monotonic() >= worker.until else None
