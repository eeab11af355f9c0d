"""Contenders timed in one process, in turns. A device's clock is waited for by its own synchronisation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

LONG_ENOUGH = 2e-4  # seconds of one sample: far above the clock's step and a call's jitter
MOST_CALLS = 1000  # in one sample
FEWEST_ROUNDS, MOST_ROUNDS = 5, 200


@dataclass
class Timing:
    """cold: seconds of the first call, compilation included. samples: seconds per call, one per round. calls: in each sample."""

    cold: float
    calls: int = 1
    samples: list[float] = field(default_factory=list)


def synchroniser(device: torch.device) -> Callable[[], None]:
    """What waits until a device has finished everything it was asked to do."""
    if device.type == "cpu":
        return lambda: None
    if device.type == "xla":
        import torch_xla  # type: ignore[import-not-found]

        def wait() -> None:
            torch_xla.sync(wait=True)

        return wait

    def synchronize() -> None:
        torch.accelerator.synchronize(device)

    return synchronize


def _sample(run: Callable[[], Any], calls: int, wait: Callable[[], None]) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    wait()
    return (time.perf_counter() - start) / calls


def take_turns(
    runs: Mapping[str, Callable[[], Any]],
    colds: Mapping[str, float],
    wait: Callable[[], None],
    seconds: float,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time every contender in every round, each round beginning with another one. seconds: for all of it, warm-up apart.

    A round goes to all or to none, so samples pair up. The number of calls in a sample is each contender's own.
    """
    found = {}
    for name, run in runs.items():
        _sample(run, 1, wait)  # warm
        once = min(_sample(run, 1, wait) for _ in range(2))
        found[name] = Timing(colds[name], max(1, min(MOST_CALLS, int(LONG_ENOUGH / max(once, 1e-9)))))
    names, end = list(runs), time.perf_counter() + seconds
    for turn in range(MOST_ROUNDS):
        if turn >= FEWEST_ROUNDS and time.perf_counter() > end:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].samples.append(_sample(runs[name], found[name].calls, wait))
        progress()
    return found
