"""The numbers of the TPU model: one device of a chip, as jax counts them (of a v7 chip, which has two, one).

bandwidth: bytes per second of HBM. flops: dense operations per second of the matrix units, by dtype.
Source of both: Google Cloud's "TPU system architecture" pages of each version, peak compute and HBM bandwidth per chip.
clock: not published. It follows from the peak, which is matrix units x 2 x their width^2 x clock: v5e 4 units of 128 x 128, v5p 8 of
them, v6e 2 of 256 x 256 with two operations each way; of tpu7x it is what fits its peak in the same way, and is known the least.
float32 goes through the matrix units as passes of bfloat16, at most a third as fast: the floor takes bfloat16's peak for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    clock: float
    bandwidth: float
    flops: float
    flops_8bit: float

    def peak(self, itemsize: int) -> float:
        """Operations per second on elements of so many bytes."""
        return self.flops_8bit if itemsize == 1 else self.flops


CHIPS = {
    "v5e": Chip(clock=1.5e9, bandwidth=819e9, flops=197e12, flops_8bit=393e12),
    "v5p": Chip(clock=1.75e9, bandwidth=2765e9, flops=459e12, flops_8bit=918e12),
    "v6e": Chip(clock=1.75e9, bandwidth=1640e9, flops=918e12, flops_8bit=1836e12),
    "tpu7x": Chip(clock=2.2e9, bandwidth=3690e9, flops=1153e12, flops_8bit=2307e12),
}
