"""Two cores of one logical core: barrier and exchange."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import access
from ..core import current
from ..cost.constants import GPSIMD_START_CYCLES
from ..cost.records import dma_us
from ..errors import need
from ..memory import SBUF, SHARED, WRITTEN
from ..tensor import NkiTensor
from . import enums
from .common import Instruction, choose, member, need_generation
from .common import NkiInstruction as Handle

GPSIMD_DMA_LIMIT = {4: 1024, 2: 512, 1: 256}  # bytes per partition by element size


def core_barrier(data: NkiTensor, cores: Any, engine: Any = enums.engine.gpsimd, name: str | None = None) -> Handle:
    """Both cores wait for each other; orders their accesses of `data`."""
    n = "core_barrier"
    need_generation(3, n)
    chosen = choose(engine, ("tensor", "vector", "scalar", "gpsimd", "sync"), "gpsimd", n)
    if not isinstance(data, NkiTensor):
        raise TypeError(f"{n}: data must be a tensor, not {data!r}")
    need(data.buffer is SHARED, "memory", f"{n} on {data}; it must be in shared_hbm")
    need(tuple(cores) == (0, 1), "lnc", f"{n}: cores {cores}, only (0, 1)")
    core = current()
    ins = Instruction(n, "gpsimd" if chosen == "sync" else chosen, name)
    access.touch(data)
    if core.pair is not None:
        core.pair.meet((n, data.storage.name, data.shape), ordered=data.storage)
    return ins.done(GPSIMD_START_CYCLES)


def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: Any = enums.dma_engine.dma,
    name: str | None = None,
) -> Handle:
    """Send src to the other core and receive its src into dst."""
    n = "sendrecv"
    need_generation(3, n)
    member(dma_engine, enums.dma_engine, n)
    ins = Instruction(n, "dma", name)
    src, dst = ins.tile(src, "src", (SBUF,), packed=True), ins.out(dst, "dst", (SBUF,), packed=True)
    need(
        src.dtype == dst.dtype and src.shape == dst.shape,
        "shape",
        f"{n}: {src} to {dst}; dtypes and shapes must be equal",
    )
    core = current()
    need(core.pair is not None, "lnc", f"{n} on one core; launch with kernel[2]")
    size = src.per_partition * src.itemsize
    if dma_engine is enums.dma_engine.gpsimd_dma:
        limit = GPSIMD_DMA_LIMIT[src.itemsize]
        need(size <= limit, "limit", f"{n} by gpsimd_dma of {size} bytes per partition, limit {limit}")
    need(
        send_to_rank == recv_from_rank == 1 - core.index,
        "lnc",
        f"{n}: core {core.index} sends to {send_to_rank} and receives from {recv_from_rank}; with two cores both are the other core",
    )
    payload = (access.array(src).copy() if ins.data else None, ins.usable(src), src.shape)
    x, fine, shape = core.pair.meet((n, pipe_id), payload)  # type: ignore[union-attr]
    need(shape == dst.shape, "lnc", f"{n}: the other core sent {list(shape)}, dst is {list(dst.shape)}")
    if x is not None:
        access.array(dst)[...] = x
    access.mark(dst, fine if fine is True else np.asarray(fine).reshape(dst.shape), WRITTEN, ins.poison)
    return ins.done(0, us=dma_us(dst, src), moved=src.size * src.itemsize)
