"""Peak memory of a call, counted by the allocator: bytes above what was there before it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def peak(run: Callable[[], Any], device: torch.device) -> int | None:
    """The most bytes that tensors held at once during `run()` beyond those before it, its results included. None: not known."""
    if device.type == "cpu":
        return _cpu_peak(run)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = run()
        torch.cuda.synchronize(device)
        del kept
        return torch.cuda.max_memory_allocated(device) - before
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the profiler's library writes to standard error, past Python and every log level."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _cpu_peak(run: Callable[[], Any]) -> int:
    """From the profiler's record of every allocation and release in torch's CPU allocator."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _quiet(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        kept = run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    del kept
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
