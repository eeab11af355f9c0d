"""A trace as modelled time: what each engine, the DMA and the HBM would take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..allocation import capacity, peak
from ..errors import CHECKS
from ..memory import PSUM, PSUM_BANK, SBUF, psum_banks
from . import constants
from .timeline import busy_us, in_order_us

if TYPE_CHECKING:
    from ..core import Core

MOST_INSTRUCTIONS = 10_000  # our threshold: public reports speak of thousands
ENGINES = ("tensor", "vector", "scalar", "gpsimd", "dma")


def core_times(core: Core) -> dict[str, float]:
    """Modelled us per engine if nothing else ran, DMA with one exposed start, and HBM at this core's share."""
    times = dict.fromkeys(ENGINES, 0.0)
    for record in core.trace:
        times[record.engine] += record.us
    if times["dma"]:
        times["dma"] += constants.DMA_START_US
    times["hbm"] = sum(r.hbm_bytes for r in core.trace) / constants.HBM_BYTES_PER_NS[core.generation] / 1e3
    return times


def upper_bound(core: Core) -> float:
    starts = sum(r.engine == "dma" for r in core.trace) * constants.DMA_START_US
    return starts + sum(busy_us(core, i) for i in range(len(core.trace)))


def report(cores: Sequence[Core]) -> dict[str, Any]:
    """The modelled cost of one run, of the slower core if there are two. Times in us.

    `lower_bound_us`: everything overlaps and the slowest engine decides. `upper_bound_us`: nothing overlaps, and every
    DMA pays its start. `in_order_us`: each engine in program order, waiting for its data (see timeline.py).
    """
    per_core = [core_times(c) for c in cores]
    lower = [max(t.values()) for t in per_core]
    slowest = lower.index(max(lower))
    times, core = per_core[slowest], cores[slowest]
    records = [r for c in cores for r in c.trace]
    lints: dict[str, list[str]] = {}
    for c in cores:
        for text, sites in c.lints.items():
            known = lints.setdefault(text, [])
            known += [s for s in sites if s not in known]
    if len(records) > MOST_INSTRUCTIONS:
        lints[f"[{CHECKS['lint'].code}] {len(records)} instructions, all unrolled: compiling takes minutes; use nl.fori_loop"] = ["kernel"]
    return {
        "evidence": "modelled",
        "generation": core.generation,
        "cores": len(cores),
        "instructions": len(records),
        "engine_us": {name: times[name] for name in ENGINES},
        "hbm_us": times["hbm"],
        "lower_bound_us": max(lower),
        "in_order_us": max(in_order_us(c) for c in cores),
        "upper_bound_us": max(upper_bound(c) for c in cores),
        "limiting": max(times, key=lambda name: times[name]),
        "dma_bytes": sum(r.bytes for r in records),
        "hbm_bytes": sum(r.hbm_bytes for r in records),
        "flops": sum(r.flops for r in records),
        "sbuf_peak_bytes": max(peak(c.tiles, SBUF)[0] for c in cores),
        "sbuf_capacity_bytes": capacity(core, SBUF),
        "psum_peak_banks": max(peak(c.tiles, PSUM)[0] for c in cores) // PSUM_BANK,
        "psum_banks": psum_banks(core.generation),
        "lints": lints,
    }
