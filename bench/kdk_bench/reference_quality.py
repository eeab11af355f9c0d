"""Whether a reference computes in float32 at all. One that accumulates in 16 bits makes every yardstick long, and excuses
a kernel that is as bad."""

from __future__ import annotations

import torch
from torch import Tensor

from kdk_bench.numerics import floors, slices

# The error of the median element, in units of what one rounding of every input and the rounding of the longest sum make of the
# result. Measured on the quick cases of four operators: at most 0.14. A rounding to bfloat16 is 65,536 roundings to float32.
MOST = 16.0
FEW = 4  # elements; of fewer the median says nothing: a single one may be a difference that cancels


def coarse(in_float32: Tensor, o: Tensor, *, longest: int, spread: Tensor | None) -> str | None:
    """Why the reference, computed in float32, is no float32 computation, or None.

    The median element decides: single ones may lie beyond a jump (a rounding in between, a tie) for which no one is to blame.
    """
    if not o.is_floating_point() or o.numel() < FEW:
        return None
    units = _units(in_float32, o, longest, spread)
    if units <= MOST:
        return None
    return (
        f"the reference fails its own check: computed in float32, half of its elements are off by more than {units:.3g} times "
        f"what float32 explains, limit {MOST:.0f}: it computes or accumulates in a narrower dtype"
    )


def _units(in_float32: Tensor, o: Tensor, longest: int, spread: Tensor | None) -> float:
    f = in_float32.detach().cpu().double()
    finite = torch.isfinite(f) & torch.isfinite(o)
    error = slices(torch.where(finite, (f - o).abs(), torch.nan))
    floor = floors(torch.float32, longest)
    explained = floor.worst * slices(torch.where(finite, o.abs(), 0.0)).amax(-1) + floor.absolute
    if spread is not None:
        explained = explained + slices(spread.nan_to_num(nan=0.0, posinf=0.0)).amax(-1)
    return float((error / explained[:, None]).nanmedian().nan_to_num())
