"""Rows of Trainium: the time of every engine by kdk's emulator, and the one that limits."""

from __future__ import annotations

from typing import Any

from kdk.backends import LANGUAGES, one_line
from kdk.cases import Case
from kdk.registry import OPERATORS
from kdk_bench.benchmarking.measuring import Heat
from kdk_bench.compiling.described import arguments
from kdk_bench.modelled.rows import MODELLED, Cost, Row, failed, own_kernel
from kdk_bench.work import least_bytes, least_flops

APART = 1200.0  # seconds for one row: the largest trace takes minutes
ROOFLINE = "roofline"
COLUMNS = ("in order", "bounds", "tensor\nvector", "scalar\ngpsimd", "DMA\nHBM", "limiting", f"x {ROOFLINE}")
NO_BASELINE = "what Neuron's compiler makes of the reference cannot be had here: there is no ratio to it"


class Model:
    """A context, as every language's is; it holds nothing."""

    def __init__(self, directory: str | None) -> None: ...

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def rows(self, heat: Heat, case: Case) -> list[Row]:
        """The kernel's."""
        own = own_kernel(heat, "nki")
        if isinstance(own, Row):
            return [own]
        try:
            launches = LANGUAGES["nki"].module("compile").modelled(*own, heat.target)
        except Exception as error:
            return [failed(heat, "kdk nki", "nki", error)]
        return [_row(heat, case, launches)]

    def cost(self, function: Any, args: tuple[Any, ...], target: str) -> Cost:
        """The time of the engines in order."""
        try:
            launches = LANGUAGES["nki"].module("compile").modelled(function, args, target)
        except Exception as error:  # the emulator's refusal, or the kernel's own Python
            return Cost(why_not=f"{type(error).__name__}: {one_line(error)}")
        us = sum(launch["in_order_us"] for launch in launches)
        return Cost((us,), us * 1e-6, f"{us:.1f} us in order", MODELLED)

    def plain(self, heat: Heat, args: tuple[Any, ...]) -> Cost:
        """Unknown."""
        return Cost(why_not=NO_BASELINE)


def _row(heat: Heat, case: Case, launches: list[dict[str, Any]]) -> Row:
    op = OPERATORS[heat.op].op
    args = arguments(op, heat.direction, case, heat.dtype)
    function = op.function(heat.direction)
    assert function is not None
    results = function(*args)
    least = least_bytes(op, heat.direction, args, results if isinstance(results, tuple) else (results,))
    floor = least / launches[0]["hbm_bytes_per_us"]
    engines = {name: sum(launch["engine_us"][name] for launch in launches) for name in launches[0]["engine_us"]}
    engines["hbm"] = sum(launch["hbm_us"] for launch in launches)
    figures = {
        "engine_seconds": {name: us * 1e-6 for name, us in engines.items()},
        "limiting": max(engines, key=lambda name: engines[name]),
        "bounds_seconds": [sum(launch[f"{end}_bound_us"] for launch in launches) * 1e-6 for end in ("lower", "upper")],
        "hbm_bytes": sum(launch["hbm_bytes"] for launch in launches),
        "cores": launches[0]["cores"],
        "bytes": least,
        "flops": least_flops(op, heat.direction, heat.sizes),
        "roofline_seconds": floor * 1e-6,
    }
    us = sum(launch["in_order_us"] for launch in launches)
    lints = [text for launch in launches for text in launch["lints"]]
    return Row(heat, "kdk nki", "nki", MODELLED, "", us, {ROOFLINE: us / floor}, figures, (NO_BASELINE, *dict.fromkeys(lints)))


def cells(row: Row) -> list[str]:
    """The row's figures, column by column."""
    engines = {name: f"{seconds * 1e6:.1f}" for name, seconds in row.figures["engine_seconds"].items()}
    low, high = row.figures["bounds_seconds"]
    return [
        f"{row.us:.1f} us",
        f"{low * 1e6:.1f}-\n{high * 1e6:.1f} us",
        *[f"{engines[a]}\n{engines[b]} us" for a, b in (("tensor", "vector"), ("scalar", "gpsimd"), ("dma", "hbm"))],
        row.figures["limiting"],
        f"{row.ratios[ROOFLINE]:.2f}",
    ]


def summary(row: Row) -> str:
    """Of a race, for its title."""
    figures = row.figures
    return f"; HBM's share of {figures['cores']} core(s): {figures['roofline_seconds'] * 1e6:.1f} us" if figures else ""
