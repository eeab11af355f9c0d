"""Bytes, and for every element who wrote it last and whether its value may be used."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from enum import Enum

import numpy as np

from .dtypes import ITEMSIZE


class MemoryRegion(Enum):
    """Where a tensor lives."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


SBUF, PSUM, HBM, SHARED = MemoryRegion.sbuf, MemoryRegion.psum, MemoryRegion.private_hbm, MemoryRegion.shared_hbm
ON_CHIP = (SBUF, PSUM)

PARTITIONS = 128
PSUM_BANK = 2048  # bytes per partition
PSUM_BANKS = 8
# Per partition. trn2: the figure nki-library computes with; trn1 and trn3: total less the same reserve, not verified.
SBUF_BYTES = {2: 192 * 1024 - 16384 - 264, 3: 224 * 1024 - 16384 - 264, 4: 256 * 1024 - 16384 - 264}


def psum_banks(generation: int) -> int:
    """Banks a kernel may use: the compiler keeps one where it turns DMA transposes into TensorE transposes."""
    reserved = generation >= 3 and os.environ.get("NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE", "").lower() == "true"
    return PSUM_BANKS - 1 if reserved else PSUM_BANKS


# State of an element. POISON marks a value nobody may use: it came from unwritten or invalid data.
UNTOUCHED, WRITTEN, MATMUL, POISON = 0, 1, 2, 4


class Memory:
    """A buffer and one state per `unit` bytes: an int while all are equal, an array as soon as they are not.

    Without data there is no buffer; without `tracked`, no state beyond "somebody wrote here".
    """

    def __init__(
        self,
        nbytes: int,
        unit: int,
        *,
        data: bool = True,
        buffer: np.ndarray | None = None,
        state: int = UNTOUCHED,
        tracked: bool = True,
    ) -> None:
        self.nbytes = nbytes
        self.unit = unit
        self.state: int | np.ndarray = state
        self.tracked = tracked
        self.buffer = buffer
        if buffer is None and data:
            self.buffer = np.full(nbytes, 0xFF, np.uint8)  # reads as NaN in every float dtype

    def cells(self, unit: int) -> np.ndarray:
        """The states as an array whose resolution divides `unit`."""
        if isinstance(self.state, int):
            self.state = np.full(self.nbytes // self.unit, self.state, np.uint8)
        if unit % self.unit:
            self.state, self.unit = np.repeat(self.state, self.unit), 1
        return self.state


@dataclass(eq=False)
class Placement:
    """Where an allocation lies and how long it lives. The trace keeps it after the bytes are gone.

    On chip: `rows` partitions of `row` bytes, `pitch` bytes apart. In HBM: a single row.
    """

    region: MemoryRegion
    shape: tuple[int, ...]
    dtype: str
    name: str
    site: str
    rows: int
    row: int
    pitch: int
    base: int = 0
    manual: bool = False
    first: int | None = None  # first and last instruction that used it
    last: int | None = None


class Storage:
    """One allocation: its bytes, its placement, and what happened to it as a whole."""

    def __init__(
        self,
        region: MemoryRegion,
        shape: tuple[int, ...],
        dtype: str,
        name: str,
        memory: Memory,
        base: int = 0,
        pitch: int | None = None,
        site: str = "",
    ) -> None:
        self.region, self.shape, self.dtype, self.name = region, shape, dtype, name
        self.memory = memory
        self.total = math.prod(shape) * ITEMSIZE[dtype]
        self.rows = shape[0] if region in ON_CHIP else 1
        self.row = self.total // self.rows
        self.pitch = pitch or self.row
        self.base = base
        self.placement = Placement(region, shape, dtype, name, site, self.rows, self.row, self.pitch, base, manual=pitch is not None)
        self.argument = False  # a host array: initialised from the start
        self.written = False
        self.elements_written = 0
        self.poison: tuple[str, str] | None = None  # check and place of the first unusable value stored here
        self.loops: tuple[int, ...] = ()  # dynamic loops it was created in
        self.shared_accesses: np.ndarray | None = None  # two cores: who touched each byte since the last barrier
