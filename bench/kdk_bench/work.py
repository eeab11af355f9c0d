"""The least work of an operator, by its declaration: what every figure of a bandwidth, a share or a roofline divides by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kdk.op import Op


def bytes_of(t: Tensor) -> int:
    """Of the elements that are there: an expanded dimension counts once."""
    return t.itemsize * math.prod(size for size, stride in zip(t.shape, t.stride()) if stride or size == 0)


def least_bytes(op: Op, direction: str, args: Sequence[Any], results: Sequence[Any]) -> int:
    """Every tensor that a direction reads or writes, once. What the forward saves for a backward is not of the algorithm: others
    need not write it. A backward that reads it has it among its arguments."""
    kept = results[: len(op.outputs)] if direction == "forward" else results
    return sum(bytes_of(t) for t in (*args, *kept) if isinstance(t, Tensor))


def least_flops(op: Op, direction: str, sizes: Mapping[str, int]) -> int | None:
    """As declared; None where the operator does not say."""
    return op.flops[direction](**sizes) if direction in op.flops else None
