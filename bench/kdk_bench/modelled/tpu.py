"""Modelled time of a program on a TPU that is not here: max(cycles / clock, HBM bytes / bandwidth).

The cycles are the vendor's compiler's own estimate of the final code, of kernels and of what XLA makes of jax and torch alike; the
bytes are counted from the program. Neither is a measurement: take ratios.

    with Profiler() as profiler:
        kernel = of_jax(profiler, pallas_forward, args, "v6e")          # a kernel through its launcher, or any jax function
        torch = of_torch(profiler, operator.reference, args, "v6e")     # what a user of TorchTPU gets without kdk
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kdk.backends import one_line
from kdk.cases import Case
from kdk.op import Op
from kdk_bench.modelled import scans, torchtpu
from kdk_bench.modelled.hlo import cost
from kdk_bench.modelled.pallas_program import unseen
from kdk_bench.modelled.profiler import Profiler
from kdk_bench.modelled.tpu_chips import CHIPS
from kdk_bench.work import least_bytes, least_flops

EVIDENCE = "modelled"


@dataclass(frozen=True)
class Estimate:
    """us: modelled microseconds, None where nothing is known (`why_not` says why).

    cycles: None where the compiler gave none; us is the HBM side alone then, and `caveats` says so. at_least: the cycles are of a
    part of the program, or there are none: it takes `us` or more. caveats: what is counted too low or not at all.
    stand_in: another program was modelled in place of the one that was asked for.
    """

    target: str
    us: float | None
    cycles: int | None = None
    hbm_bytes: int | None = None
    caveats: tuple[str, ...] = ()
    why_not: str = ""
    stand_in: bool = False
    at_least: bool = False

    @property
    def of_hbm(self) -> Estimate:
        """The HBM side alone."""
        us = None if self.hbm_bytes is None else self.hbm_bytes / CHIPS[self.target].bandwidth * 1e6
        return replace(self, us=us, cycles=None, at_least=True)

    @property
    def bound(self) -> str:
        """Which side decides, "cycles" or "memory"; empty where not both are known."""
        if self.cycles is None or self.hbm_bytes is None:
            return ""
        chip = CHIPS[self.target]
        return "cycles" if self.cycles / chip.clock > self.hbm_bytes / chip.bandwidth else "memory"


@dataclass(frozen=True)
class Roofline:
    """The least time that an operator can take: every tensor moved once, and its operations at the matrix units' peak.

    flops_us: None where the operator does not declare its operations.
    """

    bytes: int
    bytes_us: float
    flops_us: float | None

    @property
    def us(self) -> float:
        return max(self.bytes_us, self.flops_us or 0.0)


def of_stablehlo(profiler: Profiler, text: str, target: str, *, reread_bytes: int = 0, caveats: Sequence[str] = ()) -> Estimate:
    """The model for a StableHLO module. reread_bytes: what kernels in it move beyond each operand once."""
    program = profiler.program(text, target)
    if not program.text:
        return Estimate(target, None, why_not=program.why_not)
    found = cost(program.text, program.profile)
    said = [*caveats, *found.caveats]
    if found.cycles is None:
        why_not = f"the profiler gives no cycles: {program.why_not}" if program.why_not else "no instruction has an estimate"
        said.append(f"HBM side alone, it takes at least that: {why_not}")
    elif program.but:
        said.append(f"at least: the cycles lack those of {', '.join(program.but)}, on which the profiler aborts: {program.why_not}")
    elif program.why_not:
        said.append(f"at least: the cycles are of what the profiler had done before {program.why_not}")
    chip = CHIPS[target]
    hbm_bytes = found.hbm_bytes + reread_bytes
    us = max((found.cycles or 0) / chip.clock, hbm_bytes / chip.bandwidth) * 1e6
    at_least = found.cycles is None or bool(program.why_not)
    return Estimate(target, us, found.cycles, hbm_bytes, tuple(dict.fromkeys(said)), at_least=at_least)


def of_jax(profiler: Profiler, function: Callable[..., Any], args: tuple[Any, ...], target: str) -> Estimate:
    """A Pallas kernel's host function, or any jax function. args: tensors without data (torch's or jax's), the rest static."""
    from kdk.backends.pallas.compile import readable, traced

    try:
        program = traced(function, args, target)
        text = str(program.lower().compiler_ir("stablehlo"))
        more = unseen(program.jaxpr)
    except Exception as error:
        return Estimate(target, None, why_not=f"{type(error).__name__}: {readable(error)}")
    return of_stablehlo(profiler, text, target, reread_bytes=more.reread_bytes, caveats=more.caveats)


def of_torch(
    profiler: Profiler,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    target: str,
    *,
    directory: str | None = None,
    stand_in: Callable[..., Any] | None = None,
) -> Estimate:
    """A torch function as TorchTPU and XLA compile it, kdk's kernels included. args: tensors on the meta device, the rest as it is.

    stand_in: the same in jax, modelled and marked as that where TorchTPU cannot lower the function. Blocks that a kernel inside
    fetches again are not counted: `of_jax` of that kernel says which there are.
    """
    text, why_not = torchtpu.lower(function, args, target, directory)
    if text:
        return of_stablehlo(profiler, text, target, caveats=of_text(text))
    if stand_in is None:
        return Estimate(target, None, why_not=why_not)
    found = of_jax(profiler, stand_in, args, target)
    return replace(found, stand_in=True, caveats=(f"a stand-in in jax: {why_not}", *found.caveats))


def of_text(stablehlo: str) -> list[str]:
    """What is not seen of kernels in a program that is not traced by jax, and what stands in it for something else."""
    unseen = ["blocks that kernels fetch again are not counted"] if "tpu_custom_call" in stablehlo else []
    return [*unseen, *scans.said(stablehlo)]


def roofline(op: Op, direction: str, case: Case, dtype: str, target: str) -> Roofline:
    """The floor of an operator at a model's case, by its declaration: `Op.flops` and the bytes of what it takes and returns."""
    from kdk_bench.compiling.described import arguments

    args = arguments(op, direction, case, dtype)
    function = op.function(direction)
    assert function is not None
    results = function(*args)
    moved = least_bytes(op, direction, args, results if isinstance(results, tuple) else (results,))
    chip, flops = CHIPS[target], least_flops(op, direction, case.sizes)
    itemsize = min((t.itemsize for t in args if isinstance(t, Tensor) and t.is_floating_point()), default=2)
    flops_us = flops / chip.peak(itemsize) * 1e6 if flops else None
    return Roofline(moved, moved / chip.bandwidth * 1e6, flops_us)


def say(estimate: Estimate) -> str:
    """One line for a reader."""
    if estimate.us is None:
        return one_line(f"unknown: {estimate.why_not}")
    marks = ", a stand-in" if estimate.stand_in else ""
    return one_line(f"{estimate.us:.1f} us modelled{marks}{'; ' if estimate.caveats else ''}{'; '.join(estimate.caveats)}")
