"""record() and its numbers."""

from __future__ import annotations

import threading

import torch

import kdk


def rms_norm(times: int = 1) -> None:
    x, w = torch.randn(2, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    for _ in range(times):
        kdk.ops.rms_norm(x, w, 1e-5).sum().backward()


def test_calls() -> None:
    rms_norm()
    with kdk.record() as r:
        rms_norm(3)
        assert r.calls("rms_norm") == 3  # meanwhile
        rms_norm(2)
    rms_norm()
    assert r.calls("rms_norm") == r.calls("rms_norm", "backward") == 5
    assert r.calls("rms_norm", implementation="reference") == 5
    assert r.calls("rms_norm", implementation="triton") == r.calls("rms_norm", how="simulated") == 0
    assert [(row.op, row.direction, row.calls) for row in r.rows] == [
        ("rms_norm", "forward", 5),
        ("rms_norm", "backward", 5),
    ]
    assert str(r).splitlines()[0] == "rms_norm.forward: reference device x5"


def test_nested_records() -> None:
    with kdk.record() as outer:
        rms_norm()
        with kdk.record() as inner:
            rms_norm(2)
    assert (outer.calls("rms_norm"), inner.calls("rms_norm")) == (3, 2)


def test_nothing_ran() -> None:
    with kdk.record() as r:
        pass
    assert r.rows == [] and str(r) == ""


def test_refusals_are_no_calls() -> None:
    x = torch.randn(2, 41)
    with kdk.record() as r:
        kdk.ops.cube(x)
    assert r.calls("cube") == 1 and r.calls("cube", how="refused") == 1
    assert "cube.forward: torch refused x1 (41 columns; an even number is needed)" in str(r)


def test_threads_lose_no_count() -> None:
    each, threads = 200, 8
    with kdk.record() as r:
        running = [threading.Thread(target=rms_norm, args=(each,)) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    assert r.calls("rms_norm") == r.calls("rms_norm", "backward") == each * threads


def test_inlined_calls_are_counted_when_they_are_eager() -> None:
    with kdk.record() as r, kdk.use("reference"):
        rms_norm(4)
    assert [(row.how, row.reason, row.calls) for row in r.rows] == [("inlined", "use", 4)]
