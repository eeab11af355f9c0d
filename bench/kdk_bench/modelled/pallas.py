"""Rows of TPUs: a kernel, and what a user of TorchTPU gets without kdk, each against the other and against the roofline."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from kdk.cases import Case
from kdk.op import Op
from kdk.registry import OPERATORS
from kdk_bench.benchmarking.measuring import Heat
from kdk_bench.compiling.described import arguments
from kdk_bench.modelled import torchtpu, tpu
from kdk_bench.modelled.profiler import Profiler
from kdk_bench.modelled.rows import MODELLED, UNKNOWN, Cost, Reference, Row, own_kernel
from kdk_bench.modelled.tpu_chips import CHIPS
from kdk_bench.work import least_flops

ROOFLINE, WITHOUT = "roofline", "without kdk"
AT_LEAST, AT_MOST, OF_BYTES = f"{WITHOUT}, at least", f"{WITHOUT}, at most", f"{WITHOUT}, HBM bytes"
MARKS = {WITHOUT: "", AT_LEAST: "≥ ", AT_MOST: "≤ ", OF_BYTES: "bytes "}
BASELINE = "torch, by TorchTPU"
ALGORITHM = "its algorithm, by XLA"
COLUMNS = ("time\n(bound)", "cycles\nof the compiler", "HBM", f"x {ROOFLINE}", f"x {WITHOUT}")


class Model:
    """Compilers in processes of their own; what TorchTPU makes of a reference is the same for every chip, and kept."""

    def __init__(self, directory: str | None, profiler: Profiler | None = None) -> None:
        self.directory = directory
        self.profiler = profiler or Profiler()
        self.lowered: dict[Any, tuple[str, str]] = {}

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.profiler.__exit__(kind, value, trace)

    def rows(self, heat: Heat, case: Case) -> list[Row]:
        """The kernel's, that of its algorithm left to XLA where the operator has it, and the torch reference's."""
        op = OPERATORS[heat.op].op
        floor = tpu.roofline(op, heat.direction, case, heat.dtype, heat.target)
        args = arguments(op, heat.direction, case, heat.dtype)
        plain = self.torch((heat.op, heat.direction, heat.case, heat.dtype), Reference(heat.op, heat.direction), args, heat.target)
        found = [entry(heat, BASELINE, "", plain)]
        own = own_kernel(heat, "pallas")
        if isinstance(own, Row):
            found.insert(0, own)
        else:
            found.insert(0, entry(heat, "kdk pallas", "pallas", tpu.of_jax(self.profiler, *own, heat.target)))
            twin = left_to_xla(op, heat.direction)
            if twin is not None:
                found.insert(1, entry(heat, ALGORITHM, "", tpu.of_jax(self.profiler, twin, own[1], heat.target)))
        work = {"bytes": floor.bytes, "flops": least_flops(op, heat.direction, heat.sizes), "roofline_seconds": floor.us * 1e-6}
        return [
            replace(row, ratios={**row.ratios, ROOFLINE: row.us / floor.us}, figures={**row.figures, **work}) if row.us else row
            for row in compared(found, found[-1])
        ]

    def cost(self, function: Any, args: tuple[Any, ...], target: str) -> Cost:
        """Modelled time, then cycles: of two that wait for memory, the one with more of them to spare."""
        return _cost(tpu.of_jax(self.profiler, function, args, target))

    def plain(self, heat: Heat, args: tuple[Any, ...]) -> Cost:
        """What a user of TorchTPU gets without kdk."""
        key = (heat.op, heat.direction, heat.case, heat.dtype)
        return _cost(self.torch(key, Reference(heat.op, heat.direction), args, heat.target))

    def torch(self, key: Any, function: Any, args: Sequence[Any], target: str) -> tpu.Estimate:
        """A torch function by TorchTPU and XLA. key: says what it is; it is lowered once for all chips."""
        if key not in self.lowered:
            self.lowered[key] = torchtpu.lower(function, args, target, self.directory)
        text, why_not = self.lowered[key]
        if not text:
            return tpu.Estimate(target, None, why_not=why_not)
        return tpu.of_stablehlo(self.profiler, text, target, caveats=tpu.of_text(text))


def left_to_xla(op: Op, direction: str) -> Callable[..., Any] | None:
    """A kernel's own algorithm in jax, on the kernel's arguments: of the operator's xla.py, or xla_backward.py, if it has one."""
    name = f"{op.package}.xla{'' if direction == 'forward' else '_backward'}"
    if importlib.util.find_spec(name) is None:
        return None
    return getattr(importlib.import_module(name), direction)  # type: ignore[no-any-return]


def _cost(estimate: tpu.Estimate) -> Cost:
    if estimate.us is None or estimate.cycles is None or estimate.at_least:
        return Cost(why_not=estimate.why_not or "; ".join(estimate.caveats) or "the profiler gives no cycles")
    text = f"{estimate.us:.1f} us, {estimate.bound}; {estimate.cycles:,} cycles"
    return Cost((round(estimate.us, 2), estimate.cycles), estimate.us * 1e-6, text, MODELLED)


def entry(heat: Heat, contender: str, implementation: str, estimate: tpu.Estimate) -> Row:
    """An estimate as a row."""
    if estimate.us is None:
        return Row(heat, contender, implementation, UNKNOWN, estimate.why_not)
    figures = {
        "cycles": estimate.cycles,
        "clock": CHIPS[heat.target].clock,
        "hbm_bytes": estimate.hbm_bytes,
        "hbm_bandwidth": CHIPS[heat.target].bandwidth,
        "bound": estimate.bound,
        "stand_in": estimate.stand_in,
        "at_least": estimate.at_least,
    }
    return Row(heat, contender, implementation, MODELLED, "", estimate.us, {}, figures, estimate.caveats)


def compared(rows: Sequence[Row], plain: Row) -> list[Row]:
    """Every row's ratio to the plain one: of the times, a bound where one of the two takes at least its time; where both do, of
    the HBM bytes. The caveat says which."""
    return [row if row.us is None or plain.us is None else _compared(row, plain) for row in rows]


def _compared(row: Row, plain: Row) -> Row:
    assert row.us is not None and plain.us is not None
    ratio, own, other = row.us / plain.us, row.figures["at_least"], plain.figures["at_least"]
    if row is plain or not (own or other):
        return replace(row, ratios={WITHOUT: ratio})
    if own and other:
        said = f"the ratio to {WITHOUT} is that of the HBM bytes: the cycles of both are not known in full"
        return replace(row, ratios={OF_BYTES: row.figures["hbm_bytes"] / plain.figures["hbm_bytes"]}, caveats=(*row.caveats, said))
    said = f"the ratio to {WITHOUT} is {'at least' if own else 'at most'} that: of one of the two the cycles are not known in full"
    return replace(row, ratios={AT_LEAST if own else AT_MOST: ratio}, caveats=(*row.caveats, said))


def cells(row: Row) -> list[str]:
    """The row's figures, column by column."""
    figures = row.figures
    cycles = figures["cycles"]
    least = "≥ " if figures["at_least"] else ""
    floor = "" if ROOFLINE not in row.ratios else f"{least}{row.ratios[ROOFLINE]:.2f}"
    without = "".join(f"{mark}{row.ratios[name]:.2f}" for name, mark in MARKS.items() if name in row.ratios)
    return [
        f"{least}{row.us:.1f} us\n{figures['bound'] or 'HBM alone'}",
        "none" if cycles is None else f"{least}{cycles:,}\n{cycles / figures['clock'] * 1e6:.1f} us",
        f"{figures['hbm_bytes'] / 1e6:.1f} MB\n{figures['hbm_bytes'] / figures['hbm_bandwidth'] * 1e6:.1f} us",
        floor,
        without,
    ]


def summary(row: Row) -> str:
    """Of a race, for its title."""
    floor = row.figures.get("roofline_seconds")
    return f"; roofline {floor * 1e6:.1f} us" if floor else ""
