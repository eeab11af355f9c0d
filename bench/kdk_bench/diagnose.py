"""Where a refused output is wrong, and what that looks like. On tensors only.

The guesses at the cause are in `hypotheses`, `regions`, `rereading`, `replanting` and `relations`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdk_bench import hypotheses, regions, relations, replanting, rereading
from kdk_bench.hypotheses import TILES, Box, Case, Finding, Reference
from kdk_bench.numerics import errors, unravel
from kdk_bench.regions import bounding_box

# From the most specific to the least: the first that explains the output is the guess.
HYPOTHESES: tuple[Callable[[Case], Finding | None], ...] = (
    hypotheses.returns_input,
    regions.stale,
    hypotheses.constant,
    hypotheses.shift,
    hypotheses.permuted,
    hypotheses.sign_or_inverse,
    hypotheses.narrowed,
    hypotheses.biased,
    rereading.as_contiguous,
    rereading.swapped,
    rereading.moved_input,
    rereading.repeated_input,
    regions.region,
    hypotheses.not_finite,
    rereading.rounded_input,
    hypotheses.imprecise,
    rereading.part_of_input,
    hypotheses.scaled,
    replanting.planted,
    relations.misplaced,
    relations.small,
    relations.formula,
)


@dataclass(frozen=True)
class Diagnosis:
    """What a failure report says about one output."""

    worst_index: tuple[int, ...]
    got: float
    expected: float
    box: Box  # per dimension [first, one past the last) wrong index
    share: float  # of the elements that are wrong
    tile: str  # which tiles the box covers, empty when it covers everything
    cause: str  # one of hypotheses.CAUSES
    details: str


def diagnose(
    k: Tensor,
    y: Tensor,
    o: Tensor,
    *,
    longest: int,
    inputs: Mapping[str, Tensor] | None = None,
    tiles: Sequence[int] = (),
    previous: Tensor | None = None,
    reference: Reference | None = None,
) -> Diagnosis:
    """Describe an output that `numerics.judge` or a pool refused. k, y, o, longest: as there.

    inputs: the tensors the kernel read, by name, with their strides; tiles: its tile sizes, if known; previous: an
    output that the same buffer may have held before; reference: the oracle as a function of the inputs, to see what a
    misread input would give (it gets floating-point inputs in float64, and runs some tens of times: give a small case).
    ValueError where nothing is wrong, or where shapes or dtypes differ, about which `judge` says everything.
    """
    k, y, o = (t.detach().cpu() for t in (k, y, o))
    if k.shape != o.shape or y.shape != o.shape or k.dtype != y.dtype:
        raise ValueError(
            f"cannot compare k {tuple(k.shape)} {k.dtype}, y {tuple(y.shape)} {y.dtype} and o {tuple(o.shape)} "
            "element by element; the verdict of judge() says what differs"
        )
    error, limit = _error_and_limit(k, y, o, longest)
    wrong = error > limit
    stands_out = bool(wrong.any())
    if not stands_out:
        # Refused by an RMS or by the pool: no element stands out, so all that are not the rounded oracle count.
        wrong = k.double() != o.to(k.dtype).double()
    if not wrong.any():
        raise ValueError("nothing to diagnose: every element of the output is the rounded oracle")
    ratio = torch.where(wrong, torch.nan_to_num(error / limit, nan=math.inf), -1.0)
    worst = unravel(int(ratio.argmax()), k.shape)
    box = bounding_box(wrong)
    held = {name: t.detach().cpu() for name, t in (inputs or {}).items()}
    before = None if previous is None or previous.shape != k.shape else previous.detach().cpu()
    sizes = tuple(tiles) or TILES
    case = Case(k, k.double(), o.double(), limit, wrong, stands_out, box, held, longest, sizes, before, reference)
    findings = (test(case) for test in HYPOTHESES)
    cause, details = next((found for found in findings if found is not None), ("unknown", ""))
    share = float(wrong.double().mean())
    return Diagnosis(worst, float(k[worst]), float(o[worst]), box, share, _tile(case, worst), cause, details)


def explain(d: Diagnosis) -> str:
    """The diagnosis in two lines."""
    box = ", ".join(f"{low}:{high}" for low, high in d.box)
    where = f" ({d.tile})" if d.tile else ""
    details = f": {d.details}" if d.details else ""
    return (
        f"worst at {d.worst_index}: got {d.got:.6g}, expected {d.expected:.6g}; "
        f"{d.share:.3%} of the elements are wrong, all in [{box}]{where}\n"
        f"likely cause: {d.cause}{details}"
    )


# What is wrong


def _error_and_limit(k: Tensor, y: Tensor, o: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    if k.is_floating_point() and k.numel():
        e = errors(k, y, o, longest)
        return e.error, e.limit
    return (k != o).double(), torch.zeros(o.shape, dtype=torch.float64)


def _tile(case: Case, worst: tuple[int, ...]) -> str:
    parts = []
    for axis in case.cut_axes():
        low, high = case.box[axis]
        tile = case.aligned_tile(axis)
        if tile is None:
            fitting = [t for t in case.tiles if low // t == (high - 1) // t]
            tile = min(fitting, default=max(case.tiles))
            low = high = worst[axis]
        first, last = low // tile, max(low, high - 1) // tile
        end = min((last + 1) * tile, case.k.shape[axis]) - 1
        number = f"tile {first}" if first == last else f"tiles {first}-{last}"
        parts.append(f"axis {axis}: {first * tile}-{end}, {number} of {tile}")
    return "; ".join(parts)
