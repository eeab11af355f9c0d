"""The enumerations of nki.isa, with the values of the vendor's stubs."""

from __future__ import annotations

from enum import Enum


class engine(Enum):
    """Engines of a NeuronCore; unknown lets the compiler choose."""

    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    dma = 4
    sync = 6
    unknown = 0


class reduce_cmd(Enum):
    """What an instruction does with the accumulator registers of its engine."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who generates the descriptors of a DMA."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What a dynamic index out of bounds does."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    none = "none"
    double_row = "double_row"


class nc_version(Enum):
    """Generation of a NeuronCore; ordered."""

    gen2 = 2
    gen3 = 3
    gen4 = 4

    def __ge__(self, other: nc_version) -> bool:
        return self.value >= other.value

    def __gt__(self, other: nc_version) -> bool:
        return self.value > other.value

    def __le__(self, other: nc_version) -> bool:
        return self.value <= other.value

    def __lt__(self, other: nc_version) -> bool:
        return self.value < other.value


class dma_engine(Enum):
    dma = 1
    gpsimd_dma = 2
