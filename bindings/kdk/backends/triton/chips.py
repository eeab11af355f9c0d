"""What a launcher may ask of a GPU and what a kernel may use of it, for the chips that kdk compiles for.

Sources: NVIDIA, CUDA Programming Guide, "Technical Specifications per Compute Capability"; AMD, CDNA 3 and CDNA 4 instruction set
and architecture documents (512 vector registers of each lane and four SIMDs a compute unit; LDS of 64 and 160 KiB). The number of
processors is that of the data-centre or, for sm_120, largest consumer part with the chip, from its maker's data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
GIB = 1024**3


@dataclass(frozen=True)
class Chip:
    """shared: bytes of a block at most. shared_total, warps, blocks, registers: of a processor. memory: bytes of the device."""

    name: str
    part: str
    processors: int
    shared: int
    shared_total: int
    warps: int
    blocks: int
    registers: int
    memory: int
    warp_size: int = 32

    @property
    def capability(self) -> tuple[int, int]:
        """As torch.cuda.get_device_capability gives it; a HIP device has that of its architecture, 9.4 for gfx942."""
        if self.name.startswith("sm_"):
            return divmod(int(self.name[3:]), 10)
        return int(self.name[3:-2]), int(self.name[-2])


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("sm_80", "A100 80GB", 108, 163 * KIB, 164 * KIB, 64, 32, 65536, 80 * GIB),
        Chip("sm_90", "H100 SXM", 132, 227 * KIB, 228 * KIB, 64, 32, 65536, 80 * GIB),
        Chip("sm_100", "B200", 148, 227 * KIB, 228 * KIB, 64, 32, 65536, 180 * GIB),
        Chip("sm_120", "GeForce RTX 5090", 170, 99 * KIB, 100 * KIB, 48, 24, 65536, 32 * GIB),
        Chip("gfx942", "Instinct MI300X", 304, 64 * KIB, 64 * KIB, 32, 32, 131072, 192 * GIB, warp_size=64),
        Chip("gfx950", "Instinct MI355X", 256, 160 * KIB, 160 * KIB, 32, 32, 131072, 288 * GIB, warp_size=64),
    )
}
MOST_REGISTERS = 255  # of a thread, NVIDIA
REGISTER_UNIT = 256  # registers are handed to a warp of NVIDIA's in so many
SHARED_UNIT = 128  # bytes
SHARED_OF_BLOCK = KIB  # bytes that the system keeps in every block of NVIDIA's
TENSOR_MEMORY = 512  # columns, sm_100
SIMDS = 4  # of an AMD compute unit
