"""Chips as their vendors describe them, and the time a call is modelled to take. All figures here are declared, and so inputs of
a model: times from them are `modelled`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """hbm: bytes; bandwidth: bytes a second; flops: dense bfloat16 operations a second; launch: seconds a call costs at least
    (assumed); host: bytes a second between chip and host (assumed); trip: seconds that a visit to the host costs (assumed)."""

    name: str
    platform: str
    hbm: int
    bandwidth: float
    flops: float
    source: str
    launch: float = 10e-6
    host: float = 16e9
    trip: float = 100e-6


GB = 1_000_000_000
GOOGLE = "cloud.google.com/tpu/docs, system architecture"
AWS = "AWS Neuron documentation, architecture"
NVIDIA = "NVIDIA data sheet"

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "tpu", 16 * GB, 819e9, 197e12, GOOGLE),
        Chip("v5p", "tpu", 95 * GB, 2765e9, 459e12, GOOGLE),
        Chip("v6e", "tpu", 32 * GB, 1640e9, 918e12, GOOGLE),
        Chip("tpu7x", "tpu", 192 * GB, 7380e9, 2307e12, GOOGLE),
        Chip("trn2", "neuron", 96 * GB, 2900e9, 667e12, AWS),
        Chip("trn3", "neuron", 144 * GB, 4900e9, 671e12, AWS),
        Chip("sm_80", "cuda", 80 * GB, 2039e9, 312e12, NVIDIA + ": A100 80GB SXM", launch=5e-6),
        Chip("sm_90", "cuda", 80 * GB, 3350e9, 989e12, NVIDIA + ": H100 SXM", launch=5e-6),
    )
}


def seconds(chip: Chip, bytes_moved: float, flops: float, calls: float) -> float:
    """Modelled: the slower of memory and arithmetic, and the launches before it."""
    return max(bytes_moved / chip.bandwidth, flops / chip.flops) + calls * chip.launch


def on_host(chip: Chip, bytes_moved: float, calls: float) -> float:
    """Modelled: inputs and outputs over the bus, and a visit per call."""
    return bytes_moved / chip.host + calls * chip.trip
