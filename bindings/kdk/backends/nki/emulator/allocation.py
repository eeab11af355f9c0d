"""nl.ndarray: where a tensor is placed, and whether the chip has that much memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from .core import Core, current
from .dtypes import ITEMSIZE, dtype_name
from .errors import build_error, call_site, need, refuse
from .memory import (
    ON_CHIP,
    PARTITIONS,
    PSUM,
    PSUM_BANK,
    SBUF,
    SBUF_BYTES,
    SHARED,
    WRITTEN,
    Memory,
    MemoryRegion,
    Placement,
    Storage,
    psum_banks,
)
from .tensor import NkiTensor


def capacity(core: Core, region: MemoryRegion) -> int:
    """Bytes per partition that a kernel may use."""
    return psum_banks(core.generation) * PSUM_BANK if region is PSUM else SBUF_BYTES[core.generation]


def allocate(shape: Any, dtype: Any, buffer: Any = SBUF, name: str = "", address: tuple[int, int] | None = None) -> NkiTensor:
    """A new tensor without values."""
    core = current()
    if not isinstance(buffer, MemoryRegion):
        refuse("removed", f"buffer {buffer!r}; use nl.sbuf, nl.psum, nl.hbm or nl.shared_hbm")
    dtype = dtype_name(dtype)
    sizes = _shape(shape)
    if buffer in ON_CHIP:
        storage = _on_chip(core, sizes, dtype, buffer, name, address)
    else:
        need(address is None, "argument", f"address {address} of a tensor in {buffer.value}; only tiles on chip have one")

        def create() -> Storage:
            return _in_hbm(core, sizes, dtype, buffer, name)

        shared = buffer is SHARED and core.pair is not None
        storage = core.pair.storage(core, create, sizes, dtype) if shared else create()  # type: ignore[union-attr]
    if not storage.loops:
        storage.loops = tuple(core.loops)
    return NkiTensor(sizes, dtype, storage, buffer, name)


def _shape(shape: Any) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    for n in sizes:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise TypeError(f"shape {shape!r}: sizes are ints known while tracing")
    need(sizes and all(n > 0 for n in sizes), "argument", f"shape {sizes}; sizes must be positive")
    return tuple(int(n) for n in sizes)


def _in_hbm(core: Core, shape: tuple[int, ...], dtype: str, buffer: MemoryRegion, name: str) -> Storage:
    size = ITEMSIZE[dtype]
    memory = Memory(math.prod(shape) * size, size, data=core.data, tracked=core.data)
    return Storage(buffer, shape, dtype, name, memory, site=call_site())


def _on_chip(core: Core, shape: tuple[int, ...], dtype: str, buffer: MemoryRegion, name: str, address: tuple[int, int] | None) -> Storage:
    need(shape[0] <= PARTITIONS, "partitions", f"a tile of {shape[0]} partitions in {buffer.value}, limit {PARTITIONS}")
    size, limit = ITEMSIZE[dtype], capacity(core, buffer)
    row = math.prod(shape[1:]) * size
    need(
        row <= limit,
        "capacity",
        f"{list(shape)} {dtype} takes {row} bytes per partition of {buffer.value}, limit {limit}",
    )
    if address is None:
        storage = Storage(buffer, shape, dtype, name, Memory(shape[0] * row, size, data=core.data), site=call_site())
        core.tiles.append(storage.placement)
        return storage
    need(len(address) == 2, "argument", f"address {address}; expected (partition, byte offset)")
    partition, offset = address
    need(
        partition >= 0 and partition + shape[0] <= PARTITIONS,
        "capacity",
        f"address {address}: {shape[0]} partitions from {partition}",
    )
    need(
        offset >= 0 and offset + row <= limit,
        "capacity",
        f"address {address}: {row} bytes from {offset}, limit {limit}",
    )
    need(
        buffer is SBUF or offset % PSUM_BANK == 0,
        "capacity",
        f"address {address} in PSUM is not the start of a bank of {PSUM_BANK} bytes",
    )
    if buffer not in core.arenas:
        core.arenas[buffer] = Memory(PARTITIONS * limit, 1, data=core.data)
    storage = Storage(buffer, shape, dtype, name, core.arenas[buffer], partition * limit + offset, limit, call_site())
    core.tiles.append(storage.placement)
    return storage


def constant(array: np.ndarray, name: str) -> NkiTensor:
    """A tensor in shared HBM with given content."""
    core, dtype = current(), dtype_name(array.dtype)
    content = np.ascontiguousarray(array)
    memory = Memory(
        content.nbytes,
        content.itemsize,
        buffer=content.copy().reshape(-1).view(np.uint8),
        data=core.data,
        state=WRITTEN,
        tracked=core.data,
    )
    storage = Storage(SHARED, content.shape, dtype, name, memory)
    storage.written = True
    return NkiTensor(content.shape, dtype, storage, SHARED, name)


def peak(tiles: Iterable[Placement], region: MemoryRegion) -> tuple[int, list[Placement]]:
    """Largest sum of bytes per partition that are live at once, and what is live then.

    A tile lives from its first to its last instruction. That is a lower bound: overlapping iterations need more.
    """
    unit = PSUM_BANK if region is PSUM else 1
    events: list[tuple[int, int, int, Placement]] = []
    for tile in tiles:
        if tile.region is region and tile.first is not None and tile.last is not None:
            size = -(-tile.row // unit) * unit
            events += [(tile.first, 0, size, tile), (tile.last, 1, -size, tile)]
    live: dict[int, Placement] = {}
    total = most = 0
    most_live: list[Placement] = []
    for _, kind, size, tile in sorted(events, key=lambda e: e[:2]):
        total += size
        if kind:
            del live[id(tile)]
        else:
            live[id(tile)] = tile
        if total > most:
            most, most_live = total, list(live.values())
    return most, most_live


def check_capacity(core: Core) -> None:
    """Refuse a kernel whose live tiles do not fit, and manual addresses that overlap while both are live."""
    for region in ON_CHIP:
        most, live = peak(core.tiles, region)
        limit = capacity(core, region)
        if most > limit:
            largest = sorted(live, key=lambda s: -s.row)[:4]
            what = ", ".join(f"{s.name or 'tile'} {list(s.shape)} {s.dtype} ({s.row} bytes, {s.site})" for s in largest)
            raise build_error(
                "capacity",
                f"{most} bytes per partition of {region.value} live at once, limit {limit}; the largest: {what}",
                largest[0].site,
            )
        _check_overlap([s for s in core.tiles if s.region is region and s.manual and s.first is not None])


def _check_overlap(manual: list[Placement]) -> None:
    manual.sort(key=lambda s: s.first or 0)
    for i, a in enumerate(manual):
        for b in manual[i + 1 :]:
            if b.first is None or a.last is None or b.first >= a.last:
                break
            rows = range(max(a.base // a.pitch, b.base // b.pitch), min(a.base // a.pitch + a.rows, b.base // b.pitch + b.rows))
            start = max(a.base % a.pitch, b.base % b.pitch)
            end = min(a.base % a.pitch + a.row, b.base % b.pitch + b.row)
            if rows and start < end and b.first < a.last:
                raise build_error(
                    "capacity",
                    f"{b.name or 'tile'} {list(b.shape)} overlaps {a.name or 'tile'} {list(a.shape)} "
                    f"({a.site}) at bytes {start} to {end} while both are live",
                    b.site,
                )
