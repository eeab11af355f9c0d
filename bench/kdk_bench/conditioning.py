"""How far rounding alone may take a result from the oracle: what inputs a rounding away and sums in other orders make of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MOVES = 16  # of the inputs, to see how far the oracle moves
SURE = 3  # standard deviations that an error may reach
MEDIAN = 0.89  # of the RMS of three normal numbers with a standard deviation of 1


def moved(args: tuple[Any, ...], real: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    """float64 arguments, each element a rounding of float32 away. What the oracle makes of that is what no kernel can know.

    real: the arguments as the kernel has them. What is one element there, read along an expanded dimension, moves as one.

    Elements at one place of different arguments move together in some moves and against each other in others: two moves
    that cancel in all of them would hide how much the result hangs on either (x and rstd of a norm of one element).
    """
    step = torch.finfo(torch.float32).eps

    def move(t: Tensor, like: Tensor, argument: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        elements = [1 if stride == 0 else size for size, stride in zip(like.shape, like.stride())]
        code = 1 + (torch.randint(0, MOVES - 1, elements, generator=generator) + argument) % (MOVES - 1)
        differ = code & number  # rows of a Hadamard matrix: of two codes, every pair of signs comes equally often
        sign = 1 - 2 * ((differ ^ differ >> 1 ^ differ >> 2 ^ differ >> 3) & 1)
        return t * (1 + step * sign)

    pairs = enumerate(zip(args, real))
    return tuple([move(a, r, i) if isinstance(a, Tensor) and a.dtype == torch.float64 else a for i, (a, r) in pairs])


def _distances(oracle: Tensor | None, others: list[Tensor | None]) -> Tensor | None:
    """How far each of `others` lies from the oracle, (others, ...); of integers and 8-bit numbers nothing is asked."""
    if oracle is None or oracle.dtype != torch.float64:
        return None
    found = [torch.nan_to_num((other - oracle).abs(), nan=0.0, posinf=0.0) for other in others if other is not None]
    return torch.stack(found) if found else None


def furthest(oracle: Tensor | None, others: list[Tensor | None]) -> Tensor | None:
    distances = _distances(oracle, others)
    return None if distances is None else distances.amax(0)


def reordered(oracle: Tensor | None, after_moves: list[Tensor | None], in_order: list[Tensor | None]) -> Tensor | None:
    """How far sums in some order may take a result from the oracle.

    What moved inputs do says how an element hangs on roundings; sums in order, how much larger than one rounding those are. That
    is one number for the whole result: a row that hangs on a single logit has one error, which is small in one order and not in the next.
    """
    sums, moves = _distances(oracle, in_order), _distances(oracle, after_moves)
    if sums is None or moves is None:
        return None
    deviation = moves.square().mean(0).sqrt()
    times = (sums.square().mean(0).sqrt() / deviation)[deviation > 0]
    growth = float(times.median()) / MEDIAN if times.numel() else 0.0
    return torch.maximum(sums.amax(0), SURE * growth * deviation)


def larger(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else torch.maximum(a, b)
