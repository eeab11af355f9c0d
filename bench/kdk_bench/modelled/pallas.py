"""Rows of TPUs: a kernel, and what a user of TorchTPU gets without kdk, each against the other and against the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from kdk.cases import Case
from kdk.registry import OPERATORS
from kdk_bench.benchmarking.measuring import Heat
from kdk_bench.compiling.described import arguments
from kdk_bench.modelled import torchtpu, tpu
from kdk_bench.modelled.profiler import Profiler
from kdk_bench.modelled.rows import MODELLED, UNKNOWN, Cost, Reference, Row, own_kernel
from kdk_bench.modelled.tpu_chips import CHIPS
from kdk_bench.work import least_flops

ROOFLINE, WITHOUT = "roofline", "without kdk"
BASELINE = "torch, by TorchTPU"
COLUMNS = ("time\n(bound)", "cycles\nof the compiler", "HBM", f"x {ROOFLINE}", f"x {WITHOUT}")


class Model:
    """Compilers in processes of their own; what TorchTPU makes of a reference is the same for every chip, and kept."""

    def __init__(self, directory: str | None) -> None:
        self.directory = directory
        self.profiler = Profiler()
        self.lowered: dict[Any, tuple[str, str]] = {}

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.profiler.__exit__(kind, value, trace)

    def rows(self, heat: Heat, case: Case) -> list[Row]:
        """The kernel's and the torch reference's."""
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
        return tpu.of_stablehlo(self.profiler, text, target, caveats=tpu.of_kernels(text))


def _cost(estimate: tpu.Estimate) -> Cost:
    if estimate.us is None or estimate.cycles is None:
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
    }
    return Row(heat, contender, implementation, MODELLED, "", estimate.us, {}, figures, estimate.caveats)


def compared(rows: Sequence[Row], plain: Row) -> list[Row]:
    """Every row's ratio to the plain one: of the times; of the HBM bytes, and saying so, where one of the two has no cycles."""
    found = []
    for row in rows:
        if row.us is None or plain.us is None:
            found.append(row)
        elif row.figures["cycles"] is None or plain.figures["cycles"] is None:
            said = () if row is plain else (f"the ratio to {WITHOUT} is that of the HBM bytes: of one of the two there are no cycles",)
            ratio = row.figures["hbm_bytes"] / plain.figures["hbm_bytes"]
            found.append(replace(row, ratios={WITHOUT: ratio}, caveats=(*row.caveats, *said)))
        else:
            found.append(replace(row, ratios={WITHOUT: row.us / plain.us}))
    return found


def cells(row: Row) -> list[str]:
    """The row's figures, column by column."""
    figures = row.figures
    cycles = figures["cycles"]
    ratios = [row.ratios.get(name) for name in (ROOFLINE, WITHOUT)]
    return [
        f"{row.us:.1f} us\n{figures['bound'] or 'HBM alone'}",
        "none" if cycles is None else f"{cycles:,}\n{cycles / figures['clock'] * 1e6:.1f} us",
        f"{figures['hbm_bytes'] / 1e6:.1f} MB\n{figures['hbm_bytes'] / figures['hbm_bandwidth'] * 1e6:.1f} us",
        *["" if ratio is None else f"{ratio:.2f}" for ratio in ratios],
    ]


def summary(row: Row) -> str:
    """Of a race, for its title."""
    floor = row.figures.get("roofline_seconds")
    return f"; roofline {floor * 1e6:.1f} us" if floor else ""
