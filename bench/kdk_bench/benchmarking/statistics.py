"""What is said of a handful of timings: percentiles as far as there are enough, and ratios with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000  # of the bootstrap
CONFIDENCE = 0.95
ENOUGH = {50: 1, 95: 20, 99: 100}  # samples below which a percentile would be one sample's accident


@dataclass(frozen=True)
class Ratio:
    """A time over another's: the ratio of the medians, and the interval it lies in with 95 % confidence."""

    value: float
    low: float
    high: float


def percentiles(samples: Sequence[float]) -> dict[str, float | None]:
    """p50, p95 and p99 in the samples' unit; None where there are too few. spread: the middle half of them, as a share of p50."""
    found: dict[str, float | None] = {
        f"p{p}": float(np.percentile(samples, p)) if len(samples) >= fewest else None for p, fewest in ENOUGH.items()
    }
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return {**found, "spread": float((high - low) / middle) if middle else None}


def _medians(samples: Sequence[float], picks: np.ndarray) -> np.ndarray:
    return np.asarray(np.median(np.asarray(samples)[picks], axis=1))


def paired_ratio(samples: Sequence[float], others: Sequence[float], seed: int = 0) -> Ratio:
    """samples / others, where sample i of both was taken in the same round: whole rounds are drawn again, so that what slowed
    the machine for a moment slows both."""
    if len(samples) != len(others) or not samples:
        raise ValueError(f"rounds must pair up: {len(samples)} samples against {len(others)}")
    picks = np.random.default_rng(seed).integers(0, len(samples), (RESAMPLES, len(samples)))
    ratios = _medians(samples, picks) / _medians(others, picks)
    return Ratio(float(np.median(samples) / np.median(others)), *_interval(ratios))


def ratio_of_ratios(new: tuple[Sequence[float], Sequence[float]], old: tuple[Sequence[float], Sequence[float]], seed: int = 0) -> Ratio:
    """(new / its yardstick) / (old / its yardstick): two runs, on machines or days that differ, each against the same yardstick."""
    rng = np.random.default_rng(seed)
    bootstrapped, plain = [], []
    for samples, yardstick in (new, old):
        picks = rng.integers(0, len(samples), (RESAMPLES, len(samples)))
        bootstrapped.append(_medians(samples, picks) / _medians(yardstick, picks))
        plain.append(float(np.median(samples) / np.median(yardstick)))
    return Ratio(plain[0] / plain[1], *_interval(bootstrapped[0] / bootstrapped[1]))


def _interval(values: np.ndarray) -> tuple[float, float]:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, (tail, 100 - tail))
    return float(low), float(high)
