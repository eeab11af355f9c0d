"""What the trace keeps of an instruction, and the cycle formulas shared by several of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..core import current
from ..memory import SBUF
from . import constants

if TYPE_CHECKING:
    from ..tensor import NkiTensor


class Record(NamedTuple):
    """One instruction: shapes of its first output, dtypes and memories of output then inputs, modelled cost."""

    op: str
    engine: str
    name: str | None
    partitions: int
    elements: int
    dtypes: tuple[str, ...]
    buffers: tuple[str, ...]
    bytes: int  # moved by DMA
    hbm_bytes: int
    cycles: float
    us: float
    flops: int
    after: tuple[int, ...]  # trace indices it depends on
    site: str


def elementwise(elements: float, engine: str = "vector", factor: float = 1.0) -> float:
    """One element per cycle and partition, never less than the issue interval."""
    cycles = max(constants.ISSUE_CYCLES, elements * factor)
    return cycles + (constants.GPSIMD_START_CYCLES if engine == "gpsimd" else 0)


def stream(elements: int, engine: str, *tiles: NkiTensor) -> float:
    """Copies and tensor-scalar on VectorE: 4x for contiguous 16-bit operands in SBUF, else 2x if 16-bit (gen3 on)."""
    if engine != "vector" or current().generation < 3 or any(t.itemsize != 2 for t in tiles):
        return elementwise(elements, engine)
    fast = all(t.buffer is SBUF and t.is_contiguous() for t in tiles)
    return elementwise(elements, engine, 1 / 4 if fast else 1 / 2)


def dma_us(dst: NkiTensor, src: NkiTensor, share: float = 1.0) -> float:
    """Transfer time without the start latency: engines by partitions, short payloads slower."""
    moved = max(dst.size * dst.itemsize, src.size * src.itemsize)
    chip = [t for t in (dst, src) if t.on_chip]
    partitions = min(t.partitions for t in chip) if chip else constants.DMA_ENGINES * constants.PARTITIONS_PER_DMA_ENGINE
    engines = min(constants.DMA_ENGINES, -(-partitions // constants.PARTITIONS_PER_DMA_ENGINE))
    penalty = max(1.0, min(constants.DMA_PAYLOAD_WORST, constants.DMA_PAYLOAD_BYTES * partitions / moved))
    return moved / (constants.DMA_BYTES_PER_NS[current().generation] * engines) / 1e3 * penalty / share
