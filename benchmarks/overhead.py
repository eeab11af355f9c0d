"""What a call through kdk costs above the bare dispatcher and above torch's own custom_op, and what importing kdk.ops costs.

`python benchmarks/overhead.py` prints microseconds per call, smallest and median of the rounds, and exits with 1 when a target
is missed. They are the process's own time on the CPU, which waiting for other processes does not count to. The ways are timed
in turn within each round; a target is judged by the median over the rounds of what is compared within a round.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdk import ops, registry

ROUNDS = 30
CALLS = 300
IMPORTS = 7

Way = Callable[[Tensor], Tensor]
MODES = ("inference_mode", "no_grad", "forward with grad", "forward, sum, backward")
BARE, CUSTOM, KDK = "Library.impl", "custom_op + register_autograd", "kdk"
RMS_NORM, RMS_REFERENCE = "kdk rms_norm", "its reference, called directly"


def ways() -> dict[str, Way]:
    """The body of the first three is x.clone(), of their backward grad.clone()."""
    library = torch.library.Library("kdk_overhead", "FRAGMENT")
    library.define("bare(Tensor x) -> Tensor")
    library.impl("bare", lambda x: x.clone(), "CompositeExplicitAutograd")

    def clone(x: Tensor) -> Tensor:
        return x.clone()

    custom = torch.library.custom_op("kdk_overhead::custom", mutates_args=())(clone)
    custom_backward = torch.library.custom_op("kdk_overhead::custom_backward", mutates_args=())(clone)
    custom.register_autograd(lambda ctx, grad: custom_backward(grad))
    (plain,) = registry.load_directory(Path(__file__).parent / "plain_clone")
    reference, weight = registry.OPERATORS["rms_norm"].op.reference, torch.ones(8)
    keep.append(library)
    return {
        BARE: torch.ops.kdk_overhead.bare.default,
        CUSTOM: custom,
        KDK: plain.call,
        RMS_NORM: lambda x: ops.rms_norm(x, weight, 1e-6),
        RMS_REFERENCE: lambda x: reference(x, weight, 1e-6)[0],
    }


keep: list[Any] = []  # a Library takes its operators with it when it is collected


def microseconds(way: Way, mode: str) -> float:
    x = torch.randn(8, requires_grad=mode.startswith("forward"))
    context = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}.get(mode, nullcontext)
    if mode.endswith("backward"):

        def call() -> None:
            way(x).sum().backward()
    else:

        def call() -> None:
            way(x)

    with context():
        return timeit.timeit(call, timer=time.process_time, number=CALLS) / CALLS * 1e6


def measure() -> dict[tuple[str, str], list[float]]:
    """(way, mode) -> one figure per round. A bare operator has no backward: torch would differentiate its Python body."""
    every = ways()
    pairs = [(name, way, mode) for mode in MODES for name, way in every.items() if not (name == BARE and "forward" in mode)]
    for _, way, mode in pairs:
        microseconds(way, mode)
    times: dict[tuple[str, str], list[float]] = {(name, mode): [] for name, _, mode in pairs}
    for _ in range(ROUNDS):
        for name, way, mode in pairs:
            times[name, mode].append(microseconds(way, mode))
    return times


def import_seconds() -> tuple[list[float], list[float]]:
    """Of `import torch`, and of `import kdk.ops` after it; a new process each round."""
    code = "from time import process_time as t; a = t(); import torch; b = t(); import kdk.ops; print(b - a, t() - b)"
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    torch_alone, kdk_ops = [], []
    for _ in range(IMPORTS):
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        first, then = map(float, done.stdout.split())
        torch_alone.append(first)
        kdk_ops.append(then)
    return torch_alone, kdk_ops


def main() -> int:
    torch.set_num_threads(1)
    times = measure()
    names = list(dict.fromkeys(name for name, _ in times))
    print(f"us of CPU time per call, smallest / median of {ROUNDS} interleaved rounds of {CALLS} calls; torch {torch.__version__}")
    print(f"{'':<30}" + "".join(f"{mode:>24}" for mode in MODES))
    for name in names:
        cells = [f"{min(t):.1f} / {statistics.median(t):.1f}" if (t := times.get((name, mode))) else "-" for mode in MODES]
        print(f"{name:<30}" + "".join(f"{cell:>24}" for cell in cells))
    torch_alone, kdk_ops = import_seconds()
    print(f"import torch {statistics.median(torch_alone):.2f} s, then import kdk.ops {statistics.median(kdk_ops):.2f} s\n")

    def median(kdk_over: Callable[[float, float], float], other: str, mode: str) -> float:
        return statistics.median(map(kdk_over, times[KDK, mode], times[other, mode]))

    share = statistics.median(k / t for k, t in zip(kdk_ops, torch_alone))
    judged = [
        ("inference_mode, kdk above Library.impl, us", median(lambda k, b: k - b, BARE, MODES[0]), 3.0),
        ("forward with grad, kdk over custom_op", median(lambda k, c: k / c, CUSTOM, MODES[2]), 1.3),
        ("forward, sum, backward, kdk over custom_op", median(lambda k, c: k / c, CUSTOM, MODES[3]), 1.3),
        ("import kdk.ops over import torch", share, 0.25),
    ]
    for what, value, limit in judged:
        print(f"{'holds ' if value <= limit else 'MISSED'} {what}: {value:.2f}, at most {limit}")
    return int(any(value > limit for _, value, limit in judged))


if __name__ == "__main__":
    sys.exit(main())
