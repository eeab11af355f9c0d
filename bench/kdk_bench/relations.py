"""The last guesses at the cause of a wrong output: from how the wrong values relate to what is at their place."""

import contextlib
import math

import torch
from torch import Tensor

from kdk_bench.hypotheses import FEW, Case, Finding


def misplaced(case: Case) -> Finding | None:
    """Values of the right size, related neither to those expected at their place nor to the inputs there."""
    if _related(case) is False and 1 / 3 < _size(case.k, case) / _size(case.o, case) < 3:
        return "wrong index", "the values are as large as they should be and in no relation to what belongs at their place"
    return None


def small(case: Case) -> Finding | None:
    """What is wrong is so by no more than a few roundings to bfloat16 of values as large as the output's."""
    if not torch.isfinite(case.k[case.wrong]).all() or not case.output.is_floating_point() or case.wrong.sum() < FEW:
        return None
    usable = case.wrong & torch.isfinite(case.o)
    if not usable.any():
        return None
    error, size = (float((t[usable] ** 2).mean().sqrt()) for t in (case.k - case.o, case.o))
    if not 2.0**-14 < error / max(size, 1e-300) < 2.0**-7:
        return None
    return "missing cast", f"the errors are {error / size:.2g} of the values: as if something on the way was rounded to bfloat16"


def formula(case: Case) -> Finding | None:
    """Nothing is out of its place: what was made of the values there is wrong."""
    if _related(case) is None:
        return None
    return "wrong formula", "the wrong values follow no tile, axis or stride: a term, a factor or an operation is wrong"


def _related(case: Case) -> bool | None:
    """Whether the wrong values rise and fall with the expected ones or with an input at their place; None: too few to say."""
    where = case.wrong & torch.isfinite(case.k) & torch.isfinite(case.o)
    at = where.flatten().nonzero().squeeze(1)[:4096]
    if at.numel() < 32:
        return None
    k = _ranks(case.k.flatten()[at])
    candidates = [case.o]
    for t in case.inputs.values():
        if t.is_floating_point() and t.dim() and torch.broadcast_shapes(t.shape, (1,))[-1:] == case.k.shape[-1:]:
            with contextlib.suppress(RuntimeError):  # another shape
                candidates.append(t.double().broadcast_to(case.k.shape))
    limit = 0.15 + 3 / math.sqrt(at.numel())
    for candidate in candidates:
        values = candidate.flatten()[at]
        for other in (_ranks(values), _ranks(values.abs())):
            if abs(float((k * other).mean())) > limit:
                return True
    return False


def _ranks(t: Tensor) -> Tensor:
    """Ranks of the values, scaled to mean 0 and variance 1."""
    ranks = t.nan_to_num().argsort().argsort().double()
    return (ranks - ranks.mean()) / ranks.std()


def _size(t: Tensor, case: Case) -> float:
    values = t[case.wrong & torch.isfinite(case.k) & torch.isfinite(case.o)].abs()
    return max(float(values.median()), 1e-300)
