"""How far rounding alone may take a result from the oracle: what inputs a rounding away and sums in other orders make of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kdk_bench.numerics import slices

MOVES = 16  # of the inputs, to see how far the oracle moves
NEARLY_ALL = 0.95  # of the slices of a result
APART = 2  # times the usual error of a sum in order that another order may have


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

    Sums in a few orders say it for a slice with many errors. One that hangs on a single logit has one error, which is small in one
    order and not in the next. But what moved inputs do says how an element hangs on roundings; and the other slices, how much
    more sums in order are than a rounding of the inputs. As much as in nearly all, or twice as much as is usual, they may be in any.
    """
    sums, moves = _distances(oracle, in_order), _distances(oracle, after_moves)
    if oracle is None or sums is None or moves is None or not oracle.numel():
        return None
    furthest_move = moves.amax(0)
    largest = torch.where(furthest_move > 0, furthest_move, 1.0)  # numbers of float64 cannot all be squared
    deviation = (moves / largest).square().mean(0).sqrt() * furthest_move
    finite = torch.where(torch.isfinite(oracle), oracle, 0.0)
    off, scale, peak = (slices(t).amax(-1) for t in (sums.amax(0), deviation, finite.abs()))
    scale = torch.maximum(scale, torch.finfo(torch.float32).eps * peak)  # less is no more than the rounding of the result
    times = (off / scale)[scale > 0]
    growth = min(float(times.quantile(NEARLY_ALL)), APART * float(times.median())) if times.numel() else 0.0
    return torch.maximum(sums.amax(0), growth * deviation)


def larger(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else torch.maximum(a, b)
