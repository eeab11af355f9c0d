"""A modelled timeline: every engine issues in program order and waits for the data and buffers it needs.

It knows no buffer rotation beyond what the kernel allocates and no reordering by a compiler, so it is a reading of the
kernel as written, between the bounds of the report. Two cores do not wait for each other in it. The file it writes opens
in ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import constants

if TYPE_CHECKING:
    from ..core import Core
    from ..simulator import Simulation


def busy_us(core: Core, index: int) -> float:
    """How long an instruction occupies its engine; a DMA also keeps the HBM busy."""
    record = core.trace[index]
    return max(record.us, record.hbm_bytes / constants.HBM_BYTES_PER_NS[core.generation] / 1e3)


def schedule(core: Core) -> list[tuple[float, float]]:
    """(start, end) in us of every instruction of a core; `end` is when its result can be used."""
    free: dict[str, float] = {}
    times: list[tuple[float, float]] = []
    for index, record in enumerate(core.trace):
        ready = max((times[i][1] for i in record.after), default=0.0)
        start = max(ready, free.get(record.engine, 0.0))
        busy = busy_us(core, index)
        free[record.engine] = start + busy
        times.append((start, start + busy + (constants.DMA_START_US if record.engine == "dma" else 0.0)))
    return times


def in_order_us(core: Core) -> float:
    return max((end for _, end in schedule(core)), default=0.0)


def events(cores: Sequence[Core]) -> list[dict[str, Any]]:
    """Trace events: one process per core, one thread per engine."""
    found: list[dict[str, Any]] = []
    for core in cores:
        engines = sorted({r.engine for r in core.trace})
        found.append({"ph": "M", "pid": core.index, "name": "process_name", "args": {"name": f"core {core.index} (modelled)"}})
        for tid, engine in enumerate(engines):
            found.append({"ph": "M", "pid": core.index, "tid": tid, "name": "thread_name", "args": {"name": engine}})
        for index, (record, (start, _)) in enumerate(zip(core.trace, schedule(core))):
            details: dict[str, Any] = {
                "site": record.site,
                "shape": [record.partitions, record.elements],
                "dtypes": list(record.dtypes),
            }
            details |= {"memories": list(record.buffers), "bytes": record.bytes, "flops": record.flops}
            found.append(
                {
                    "ph": "X",
                    "pid": core.index,
                    "tid": engines.index(record.engine),
                    "name": record.name or record.op,
                    "cat": record.op,
                    "ts": start,
                    "dur": busy_us(core, index),
                    "args": details,
                }
            )
    return found


def write_timeline(simulation: Simulation, path: str | os.PathLike[str]) -> None:
    """Write the modelled timeline of the last call of a simulation as Chrome trace JSON."""
    if not simulation.cores:
        raise ValueError("the simulation was not called yet")
    content = {"traceEvents": events(simulation.cores), "displayTimeUnit": "ns", "otherData": {"evidence": "modelled"}}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)
