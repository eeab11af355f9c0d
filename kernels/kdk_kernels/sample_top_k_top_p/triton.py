"""sample_top_k_top_p in Triton: a program per row, or per few short ones; thresholds by search on the bits of the logits, no sort.

A row is read again for every step of a search, from the second-level cache. Each step tries three thresholds and so settles two
bits: 16 steps for a threshold among float32 logits, 8 among bfloat16, 10 among
float16.
"""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdk_kernels.sample_top_k_top_p.reference import COLDEST

SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # lower bits of a float32 that such logits do not use
TILE = 4096  # logits that a program holds at once: 16 warps x 8 values a thread; of 16 values some spill
TUNABLE = {"elements": (1024, 2048, 4096, 8192), "warps": (4, 8, 16, 32)}  # of a program's tile; of a program


@triton.jit
def _values(logits, columns, exists, V, column_stride):
    """A tile of logits in float32; what is not there weighs nothing."""
    return tl.load(logits + columns * column_stride, mask=exists & (columns < V), other=float("-inf")).to(tl.float32)


@triton.jit
def _ordered(bits, SHIFT: tl.constexpr):
    """The upper bits of a float32 as integers of the same order, and back."""
    return bits ^ ((bits >> 31) & (0x7FFFFFFF >> SHIFT))


@triton.jit
def _number(x, SHIFT: tl.constexpr):
    return (_ordered(x, SHIFT) << SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _measure(values, t, weights, COUNT: tl.constexpr):
    """How many logits are at least t, or what they weigh: (rows, 1)."""
    chosen = values >= t
    if COUNT:
        found = tl.sum(chosen.to(tl.int32), axis=1, keep_dims=True)
    else:
        found = tl.sum(tl.where(chosen, weights, 0.0), axis=1, keep_dims=True)
    return found


@triton.jit
def _largest(
    logits, exists, V, column_stride, most, per_degree, least, wanted,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The largest float from `least` to `most` at which as much is kept as is wanted, or more; of logits from `least` on."""
    low = _ordered(least.to(tl.int32, bitcast=True) >> SHIFT, SHIFT)
    high = _ordered(most.to(tl.int32, bitcast=True) >> SHIFT, SHIFT) + 1
    for _ in range((33 - SHIFT) // 2):
        second = _middle(low, high)
        first, third = _middle(low, second), _middle(second, high)
        zero = wanted * 0
        at_first, at_second, at_third = zero, zero, zero
        for start in range(0, V, BLOCK):
            values = _values(logits, start + tl.arange(0, BLOCK)[None, :].to(tl.int64), exists, V, column_stride)
            weights = tl.exp((values - most) * per_degree)
            at_first += _measure(values, _number(first, SHIFT), weights, COUNT)
            at_second += _measure(values, _number(second, SHIFT), weights, COUNT)
            at_third += _measure(values, _number(third, SHIFT), weights, COUNT)
        low = tl.where(at_third >= wanted, third, tl.where(at_second >= wanted, second, tl.where(at_first >= wanted, first, low)))
        high = tl.where(at_third >= wanted, high, tl.where(at_second >= wanted, third, tl.where(at_first >= wanted, second, first)))
    return _number(low, SHIFT)


@triton.jit
def _kept(logits, columns, exists, V, column_stride, most, per_degree, least, share):
    """The weights that the filters leave."""
    values = _values(logits, columns, exists, V, column_stride)
    weights = tl.exp((values - most) * per_degree)
    return tl.where((values >= least) & (weights >= share), weights, 0.0)


@triton.jit
def _sample(
    logits, uniform, k, p, min_p, temperature, token, logprob, N, V,
    logits_row, logits_column, uniform_row, k_row, p_row, min_p_row, temperature_row,
    COLDEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    exists = rows < N
    logits += rows * logits_row
    columns = tl.arange(0, BLOCK)[None, :].to(tl.int64)

    most = tl.full((ROWS, 1), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        most = tl.maximum(most, tl.max(_values(logits, start + columns, exists, V, logits_column), axis=1, keep_dims=True))
    where = tl.load(uniform + rows * uniform_row, mask=exists, other=0.0).to(tl.float32)
    per_degree = tl.full((ROWS, 1), 1.0, tl.float32)
    if temperature is not None:
        degrees = tl.load(temperature + rows * temperature_row, mask=exists, other=1.0).to(tl.float32)
        where = tl.where(degrees > 0.0, where, 0.0)
        per_degree = 1.0 / tl.maximum(degrees, COLDEST)
    share = tl.zeros((ROWS, 1), tl.float32)
    if min_p is not None:
        share = tl.load(min_p + rows * min_p_row, mask=exists, other=0.0).to(tl.float32)

    everything = tl.zeros((ROWS, 1), tl.float32)  # NaN where the row is no distribution
    for start in range(0, V, BLOCK):
        weights = tl.exp((_values(logits, start + columns, exists, V, logits_column) - most) * per_degree)
        everything += tl.sum(weights, axis=1, keep_dims=True)
    least = tl.full((ROWS, 1), float("-inf"), tl.float32)
    if k is not None:
        wanted = tl.load(k + rows * k_row, mask=exists, other=0).to(tl.int32)
        wanted = tl.where((wanted > 0) & (wanted < V), wanted, V)
        least = _largest(logits, exists, V, logits_column, most, per_degree, least, wanted, True, BLOCK, SHIFT)
    if p is not None:
        total = tl.zeros((ROWS, 1), tl.float32)
        for start in range(0, V, BLOCK):
            kept = _kept(logits, start + columns, exists, V, logits_column, most, per_degree, least, 0.0)
            total += tl.sum(kept, axis=1, keep_dims=True)
        part = tl.load(p + rows * p_row, mask=exists, other=1.0).to(tl.float32)
        wanted = tl.maximum(part * total, COLDEST)
        cut = _largest(logits, exists, V, logits_column, most, per_degree, least, wanted, False, BLOCK, SHIFT)
        least = tl.where(part < 1.0, cut, least)

    total = tl.zeros((ROWS, 1), tl.float32)
    for start in range(0, V, BLOCK):
        kept = _kept(logits, start + columns, exists, V, logits_column, most, per_degree, least, share)
        total += tl.sum(kept, axis=1, keep_dims=True)
    target = where * total
    # The tile in which the running sum passes the target; the last that weighs anything, where rounding makes target the total.
    running = tl.zeros((ROWS, 1), tl.float32)
    before = running
    tile = tl.zeros((ROWS, 1), tl.int64)
    for start in range(0, V, BLOCK):
        kept = _kept(logits, start + columns, exists, V, logits_column, most, per_degree, least, share)
        sums = tl.sum(kept, axis=1, keep_dims=True)
        here = (running <= target) & (sums > 0.0)
        tile = tl.where(here, start, tile)
        before = tl.where(here, running, before)
        running += sums
    mine = _kept(logits, tile + columns, exists, V, logits_column, most, per_degree, least, share)
    last = tl.max(tl.where(mine > 0.0, columns, 0), axis=1, keep_dims=True)
    above = tl.min(tl.where(tl.cumsum(mine, axis=1) > target - before, columns, BLOCK), axis=1, keep_dims=True)
    found = tile + tl.minimum(above, last)

    value = tl.load(logits + found * logits_column, mask=exists, other=0.0).to(tl.float32)
    is_distribution = everything > 0.0
    tl.store(token + rows, tl.where(is_distribution, found, -1).to(tl.int32), mask=exists)
    log_probability = (value - most) * per_degree - tl.log(total)
    tl.store(logprob + rows, tl.where(is_distribution, log_probability, float("nan")), mask=exists)


def forward(
    logits: Tensor,
    uniform: Tensor,
    k: Optional[Tensor],
    p: Optional[Tensor],
    min_p: Optional[Tensor],
    temperature: Optional[Tensor],
    *,
    elements: Optional[int] = None,
    warps: Optional[int] = None,
) -> tuple[Tensor, Tensor]:
    N, V = logits.shape
    token = torch.empty(N, dtype=torch.int32, device=logits.device)
    logprob = torch.empty(N, dtype=torch.float32, device=logits.device)
    elements = elements or TILE
    block = min(triton.next_power_of_2(V), elements)
    rows = min(elements // block, 16, triton.next_power_of_2(N))
    numbers = [0 if t is None else t.stride(0) for t in (uniform, k, p, min_p, temperature)]
    _sample[(triton.cdiv(N, rows),)](
        logits, uniform, k, p, min_p, temperature, token, logprob, N, V, *logits.stride(), *numbers,
        COLDEST=COLDEST, ROWS=rows, BLOCK=block, SHIFT=SHIFTS[logits.dtype],
        num_warps=warps or max(4, min(16, rows * block // 256)),
    )  # fmt: skip
    return token, logprob
