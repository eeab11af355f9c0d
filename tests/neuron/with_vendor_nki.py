"""`kdk.simulate` where the vendor's nki is installed, in a process whose nki is the stand-in of `vendor/`.

It shows that kdk calls nki.simulate as documented, and leaves the environment as it was; nothing about the vendor's simulator.
Run by test_torch_neuron.py, which starts the process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import nki
import pytest
import torch
from torch import Tensor

import kdk.ops
from kdk.backends.nki import emulator, launch
from kdk.backends.nki.simulate import run_simulated


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(launch.OVERRIDE, raising=False)
    nki.CALLS.clear()
    yield


def test_the_vendors_simulator_runs_instead_of_the_emulator() -> None:
    assert emulator.vendor_nki_available() and not emulator.is_emulator(nki)
    x, weight = torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True), torch.randn(32, dtype=torch.bfloat16)
    with kdk.strict(), kdk.simulate("trn2"), kdk.record() as r:
        y = kdk.ops.rms_norm(x, weight, 1e-5)
        y.sum().backward()
    assert [(row.direction, row.implementation, row.how, row.target) for row in r.rows] == [
        ("forward", "nki", "simulated", "trn2"),
        ("backward", "nki", "simulated", "trn2"),
    ]
    assert [(c.how, c.kernel, c.target) for c in nki.CALLS] == [
        ("simulate", "rms_norm_kernel", "trn2"),
        ("simulate", "rms_norm_backward_kernel", "trn2"),
    ]
    given = [a for c in nki.CALLS for a in c.arguments if not isinstance(a, (int, float))]
    assert all(isinstance(a, Tensor) and a.dtype in (torch.bfloat16, torch.float32) and not a.requires_grad for a in given)


@pytest.mark.parametrize("before", [None, "trn3"])
def test_the_override_is_put_back(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before:
        monkeypatch.setenv(launch.OVERRIDE, before)
    with kdk.simulate("trn2"):
        kdk.ops.rms_norm(torch.randn(4, 32), torch.randn(32), 1e-5)
    assert nki.CALLS[0].target == "trn2" and os.environ.get(launch.OVERRIDE) == before


@pytest.mark.parametrize("before", [None, "trn3"])
def test_the_override_is_put_back_after_an_error(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before:
        monkeypatch.setenv(launch.OVERRIDE, before)

    @nki.jit
    def broken(x: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_simulated(lambda x: launch.run(broken, x), (torch.zeros(1),), "trn2")
    assert nki.CALLS[0].target == "trn2" and os.environ.get(launch.OVERRIDE) == before
    assert launch.LOCAL.runner is None


class SaysXla(Tensor):
    """A CPU tensor that says it is on an xla device."""

    device = property(lambda self: torch.device("xla", 0))  # type: ignore[assignment]


def test_xla_tensors_go_to_the_kernel_as_they_are() -> None:
    """XLA-based torch-neuronx: the kernel itself is called, not an operator of nki_op. No torch_xla takes part in this."""
    from kdk_kernels.rms_norm.nki import forward

    assert launch.missing("xla:neuron") is None
    x, weight = torch.randn(4, 32), torch.randn(32)
    y, _ = launch.run_on_device(forward, (x.as_subclass(SaysXla), weight.as_subclass(SaysXla), 1e-5, 0.0))
    assert [c.how for c in nki.CALLS] == ["device"]
    assert all(type(a) is SaysXla for a in nki.CALLS[0].arguments[:2])
    torch.testing.assert_close(y, kdk.ops.rms_norm(x, weight, 1e-5))


def test_two_threads_simulate_for_different_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str | None, str | None]] = []

    def simulate(kernel: Any) -> Callable[..., Any]:
        def run(target: str) -> tuple[Tensor, ...]:
            first = os.environ.get(launch.OVERRIDE)
            time.sleep(0.001)
            seen.append((target, first, os.environ.get(launch.OVERRIDE)))
            return ()

        return run

    monkeypatch.setattr(nki, "simulate", simulate)
    start = threading.Barrier(2)

    def work(target: str) -> None:
        start.wait(10)
        for _ in range(10):
            run_simulated(lambda: launch.run(None, target), (), target)  # type: ignore[arg-type]

    threads = [threading.Thread(target=work, args=(t,)) for t in ("trn2", "trn3")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 20 and all(target == first == last for target, first, last in seen)
    assert launch.OVERRIDE not in os.environ
