"""NKI kernels at full size without a device and without data: every instruction is checked against the hardware's rules and the
capacity of its memories, by kdk's emulator. That is not the vendor's compiler, so what it gives is evidence "simulated"."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kdk.backends import Compiled, one_line
from kdk.backends.nki import emulator
from kdk.backends.nki.emulator.cost import constants
from kdk.backends.nki.emulator.cost.timeline import events
from kdk.backends.nki.launch import LOCAL

EMULATED = "traced at full size by kdk's emulator, which is not the vendor's compiler"

BRIEF = "peak of SBUF a partition and its limit in KiB, banks of PSUM"


def brief(resources: Mapping[str, Any]) -> str:
    """The resources of `compile_for` in a few characters."""
    peak, limit = resources["sbuf_peak_bytes"] >> 10, resources["sbuf_capacity_bytes"] >> 10
    return f"{peak}/{limit} KiB, {resources['psum_peak_banks']}/{resources['psum_banks']} banks"


@functools.cache
def missing() -> str | None:
    """Why nothing can be compiled here, and how to get what lacks."""
    from kdk.backends.nki.launch import missing

    if emulator.vendor_nki_available():
        return "the vendor's nki is installed: kdk cannot reach its compiler without a device, and its own emulator does not run beside it"
    return missing("cpu")


def _traced(function: Callable[..., Any], args: tuple[Any, ...], target: str) -> list[emulator.Simulation]:
    """Run the host function on meta tensors; a simulation for every call of a kernel.

    A call with the shapes, dtypes and constants of an earlier one is that simulation again, as a device compiles it once.
    """
    simulations = []
    known: dict[Any, tuple[emulator.Simulation, list[Any]]] = {}

    def run(kernel: Callable[..., Any], *args: Any) -> Any:
        key = _specialisation(kernel, args)
        if key not in known:
            simulation = emulator.simulate(kernel, target=target, data=False)
            result = simulation(*args)
            results = result if isinstance(result, tuple | list) else [result]
            known[key] = simulation, [next((i for i, a in enumerate(args) if a is r), r) for r in results]
        simulation, results = known[key]
        simulations.append(simulation)
        return tuple([args[r] if isinstance(r, int) else _meta(r) for r in results])

    old, LOCAL.runner = LOCAL.runner, run
    try:
        function(*[a.to("meta") if isinstance(a, Tensor) else a for a in args])
    finally:
        LOCAL.runner = old
    return simulations


def _specialisation(kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a kernel is specialised for; unlike anything else where a constant is no plain value."""
    found: list[Any] = [getattr(kernel, "function", kernel), getattr(kernel, "grid", 0), str(getattr(kernel, "schedule", ""))]
    for a in args:
        if isinstance(a, Tensor):
            found.append((a.dtype, tuple(a.shape), next(i for i, b in enumerate(args) if a is b)))
        elif _is_plain(a):
            found.append(repr(a))  # 0, 0.0 and False are equal, and three constants
        else:
            return object()
    return tuple(found)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else value is None or isinstance(value, bool | int | float | str)


def _meta(result: emulator.TensorSpec) -> Tensor:
    name = {"bool_": "bool"}.get(result.dtype, result.dtype)
    return torch.empty(result.shape, dtype=getattr(torch, name), device="meta")


def compile_for(function: Callable[..., Any], args: tuple[Any, ...], target: str) -> Compiled:
    """Trace every kernel that `function(*args)` calls. Of tensors only shapes and dtypes are read."""
    try:
        simulations = _traced(function, args, target)
    except emulator.NkiValidationError as error:
        return Compiled(target, "refused", one_line(error), evidence="simulated")
    except Exception as error:
        return Compiled(target, "failed", f"{type(error).__name__}: {one_line(error)}", evidence="simulated")
    if not simulations:
        return Compiled(target, "failed", "no kernel was called", evidence="simulated")
    launches = [{**_resources(s), "calls": calls} for s, calls in Counter(simulations).items()]
    over = tuple([text for launch in launches for text in exceeded(launch)])
    summary: dict[str, Any] = {name: max(launch[name] for launch in launches) for name in MEMORY}
    summary |= {"instructions": sum(launch["instructions"] * launch["calls"] for launch in launches), "launches": launches}
    return Compiled(target, "compiled", EMULATED, summary, over, evidence="simulated")


MEMORY = ("sbuf_peak_bytes", "sbuf_capacity_bytes", "psum_peak_banks", "psum_banks")


def _resources(simulation: emulator.Simulation) -> dict[str, Any]:
    report = simulation.report
    found = {"kernel": getattr(simulation.kernel, "__name__", "kernel"), "cores": report["cores"]}
    return found | {name: report[name] for name in ("instructions", *MEMORY)}


def exceeded(found: dict[str, Any]) -> list[str]:
    """Budgets that a kernel breaks, each in a few words. The emulator refuses such a kernel by itself; this does not rely on it."""
    over = []
    if found["sbuf_peak_bytes"] > found["sbuf_capacity_bytes"]:
        over.append(f"{found['kernel']}: {found['sbuf_peak_bytes']} bytes of SBUF a partition, limit {found['sbuf_capacity_bytes']}")
    if found["psum_peak_banks"] > found["psum_banks"]:
        over.append(f"{found['kernel']}: {found['psum_peak_banks']} banks of PSUM, limit {found['psum_banks']}")
    return over


def modelled(function: Callable[..., Any], args: tuple[Any, ...], target: str) -> list[dict[str, Any]]:
    """The cost model's report of every kernel that is called (`emulator.cost.report`), with the HBM's bytes in a microsecond."""
    found = []
    for simulation in _traced(function, args, target):
        report = simulation.report
        bandwidth = constants.HBM_BYTES_PER_NS[report["generation"]] * 1e3 * report["cores"]
        found.append({"kernel": getattr(simulation.kernel, "__name__", "kernel"), **report, "hbm_bytes_per_us": bandwidth})
    return found


def timeline(function: Callable[..., Any], args: tuple[Any, ...], target: str) -> list[dict[str, Any]]:
    """The modelled timeline of the engines, as trace events that ui.perfetto.dev opens: a process for each kernel and core.

    Of calls that are the same simulation, one.
    """
    found = []
    for number, (simulation, calls) in enumerate(Counter(_traced(function, args, target)).items()):
        name = getattr(simulation.kernel, "__name__", "kernel") + (f", one of {calls} calls" if calls > 1 else "")
        for event in events(simulation.cores):
            core = event["pid"]
            event["pid"] = 2 * number + core
            if event["name"] == "process_name":
                event["args"] = {"name": f"{name}, core {core} (modelled)"}
            found.append(event)
    return found
