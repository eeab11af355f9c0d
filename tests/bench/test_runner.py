"""A row that dies or hangs is one result; the others run on, in a process of their own."""

from __future__ import annotations

import functools
import os
import time

import pytest

from kdk_bench.runner import FULL_LIMIT, LIMIT, Plan
from kdk_bench.workers import DIED, HUNG, each


def begin() -> None: ...


def fail() -> None:
    raise RuntimeError("cannot begin")


def work(task: str, factor: int) -> int:
    if task == "hang":
        time.sleep(600)
    if task == "die":
        os._exit(3)
    if task == "raise":
        raise ValueError(task)
    return int(task) * factor


def test_what_hangs_or_dies_is_lost_alone() -> None:
    tasks = ["1", "hang", "2", "die", "3", "4"]
    started = time.monotonic()
    found = dict(each(begin, functools.partial(work, factor=10), tasks, jobs=2, limit=8.0))
    assert found == {"1": 10, "2": 20, "3": 30, "4": 40, "hang": HUNG, "die": DIED}
    assert time.monotonic() - started < 300


def test_what_is_raised_is_raised() -> None:
    with pytest.raises(ValueError, match="raise"):
        list(each(begin, functools.partial(work, factor=10), ["1", "raise"], jobs=1, limit=30.0))
    with pytest.raises(RuntimeError, match="cannot begin"):
        list(each(fail, work, ["1", "2"], jobs=2, limit=30.0))


def test_no_tasks() -> None:
    assert list(each(begin, work, [], jobs=2, limit=3.0)) == []


def test_the_limit() -> None:
    assert (Plan(()).seconds, Plan((), full=True).seconds, Plan((), limit=5.0).seconds) == (LIMIT, FULL_LIMIT, 5.0)
