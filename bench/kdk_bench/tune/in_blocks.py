"""Whether an operator's kernel or its reference wins in the blocks of a model, as torch.compile sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kdk import tuning
from kdk.backends import LANGUAGES, TARGETS, one_line
from kdk.registry import OPERATORS
from kdk_bench.benchmarking.measuring import Heat
from kdk_bench.modelled import blocks
from kdk_bench.modelled.block_program import COMPILED, Program
from kdk_bench.modelled.pallas import Model
from kdk_bench.modelled.stored import Stored
from kdk_bench.modelled.tpu import Estimate
from kdk_bench.records import environment, today
from kdk_bench.tune.search import FAILED, UNKNOWN

KNOWN = "known"
NO_COMPILER = "blocks are modelled on TPUs alone: for other chips there is no compiler of whole programs here"


@dataclass(frozen=True)
class InBlock:
    """heat: of the block. kernel, reference: microseconds of the block with the operator's kernel and without, where a patched module
    runs its own forward; all else alike.

    keys: of the tuning file's entries, one for every bucket of the operator's calls in the block. outcome: known, unknown, failed.
    """

    op: str
    heat: Heat
    outcome: str
    reason: str = ""
    kernel: float | None = None
    reference: float | None = None
    keys: tuple[tuning.Key, ...] = ()
    caveats: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Of the times, the kernel's over the reference's."""
        return None if self.kernel is None or self.reference is None else self.kernel / self.reference

    def part(self) -> dict[str, Any] | None:
        """The part "block" of its entries."""
        if self.ratio is None:
            return None
        provenance = {"evidence": "modelled", "environment": environment(), "date": today()}
        return {"winner": tuning.winner(self.ratio), "ratio": self.ratio, "block": self.heat.op, **provenance}

    def as_json(self) -> dict[str, Any]:
        """A block of `kdk.tune/1`."""
        heat = self.heat
        return {
            "op": self.op, "block": heat.op, "direction": heat.direction, "dtype": heat.dtype, "target": heat.target,
            "sizes": dict(heat.sizes), "cut": heat.cut, "outcome": self.outcome, "reason": self.reason,
            "kernel_seconds": self.kernel and self.kernel * 1e-6, "reference_seconds": self.reference and self.reference * 1e-6,
            "ratio": self.ratio, "winner": None if self.ratio is None else tuning.winner(self.ratio),
            "buckets": [dict(sizes) for _, _, sizes in self.keys], "caveats": list(self.caveats),
            "evidence": "modelled" if self.outcome == KNOWN else "", "environment": environment(), "date": today(),
        }  # fmt: skip


def run(op: str, plan: Sequence[tuple[Heat, str]], progress: Callable[[], None] = lambda: None) -> list[InBlock]:
    """The operator in each of the blocks that call it."""
    found = []
    with Model(None, Stored()) as model:
        for heat, name in plan:
            found += _of(model, op, heat, name)
            progress()
    return found


def _of(model: Model, op: str, heat: Heat, name: str) -> list[InBlock]:
    language = TARGETS[heat.target]
    if language != "pallas":
        return [InBlock(op, heat, UNKNOWN, NO_COMPILER)]
    try:
        mine = [args for called, direction, args in blocks.calls(heat, name) if (called, direction) == (op, "forward")]
        if not mine:
            return []
        places = tuning.places(OPERATORS[op].op, "forward")
        keys = [tuning.key(heat.direction, heat.dtype, tuning.sizes_of(places, args)) for args in mine]
        kernel, reference = (_estimate(model, heat, name, (op, chosen)) for chosen in (LANGUAGES[language].name, ""))
    except Exception as error:  # of the block's or the operator's own code, on tensors without data
        return [InBlock(op, heat, FAILED, f"{type(error).__name__}: {one_line(error)}")]
    for estimate in (kernel, reference):
        if estimate.us is None:
            return [InBlock(op, heat, UNKNOWN, estimate.why_not)]
    caveats = tuple(dict.fromkeys((*kernel.caveats, *reference.caveats)))
    if kernel.at_least != reference.at_least:
        return [InBlock(op, heat, UNKNOWN, f"of one of the two the cycles are not known in full: {'; '.join(caveats)}")]
    if kernel.at_least:  # of both: the bytes of HBM are all that they can be compared by
        kernel, reference = kernel.of_hbm, reference.of_hbm
    return [InBlock(op, heat, KNOWN, "", kernel.us, reference.us, tuple(dict.fromkeys(keys)), caveats)]


def _estimate(model: Model, heat: Heat, name: str, chosen: tuple[str, str]) -> Estimate:
    program = Program(heat.case, name, heat.direction, COMPILED, heat.target, chosen)
    return blocks.estimate(model, program, heat)


def worst(found: Sequence[InBlock]) -> dict[tuning.Key, dict[str, Any]]:
    """The parts "block" by entry: of the blocks that share a bucket, the one in which the kernel does worst."""
    parts: dict[tuning.Key, dict[str, Any]] = {}
    for each in found:
        part = each.part()
        if part is None:
            continue
        for key in each.keys:
            if key not in parts or parts[key]["ratio"] < part["ratio"]:
                parts[key] = part
    return parts
