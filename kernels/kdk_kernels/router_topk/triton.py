"""router_topk, forward, in Triton: a tile of whole rows per program, k rounds of maxima over it."""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 4096  # experts that a program holds at once
TILE = 2048  # elements of a program's tile when rows are short
NUM_WARPS = 4
TUNABLE = {"elements": (512, 1024, 2048, 4096), "warps": (1, 2, 4, 8)}  # of a program's tile when rows are short; of a program
TAKEN: tl.constexpr = tl.constexpr(-(2**31))  # below every `ordered` number


@triton.jit
def ordered(x):
    """float32 -> int32 in the same order, NaN with +inf and -0 with 0. TAKEN is the image of no number."""
    x = tl.where(x != x, float("inf"), x) + 0.0
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _top(key):
    """The largest of every row and its index, the lowest of equal ones."""
    return tl.max(key, axis=1, return_indices=True, return_indices_tie_break_left=True)


@triton.jit
def best_groups(scores, TOP_GROUPS: tl.constexpr):
    """(R, G, S) -> (R, G): whether a group is among the best by the sum of its two largest. scores: padded with -inf."""
    best = tl.max(scores, axis=2, keep_dims=True)
    member = tl.arange(0, scores.shape[2])[None, None, :]
    first = tl.min(tl.where(scores == best, member, scores.shape[2]), axis=2, keep_dims=True)
    second = tl.max(tl.where(member == first, float("-inf"), scores), axis=2)
    total = tl.reshape(best, (scores.shape[0], scores.shape[1])) + second
    group = tl.arange(0, scores.shape[1])[None, :]
    key = ordered(total)
    chosen = tl.zeros(total.shape, tl.int1)
    for _ in range(TOP_GROUPS):
        _, index = _top(key)
        hit = group == index[:, None]
        chosen = chosen | hit
        key = tl.where(hit, TAKEN, key)
    return chosen


@triton.jit
def _forward(
    x, bias, weights, indices, N, k, x_row, x_col, bias_col, scale,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr, K: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SOFTMAX: tl.constexpr, BIASED: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group, member = tl.arange(0, BLOCK_GROUPS)[None, :, None], tl.arange(0, BLOCK_SIZE)[None, None, :]
    there = (group < GROUPS) & (member < SIZE)
    inside = (rows[:, None, None] < N) & there
    expert = (group * SIZE + member).to(tl.int64)
    logits = tl.load(x + rows[:, None, None] * x_row + expert * x_col, mask=inside, other=float("-inf")).to(tl.float32)
    key = ordered(logits)
    lse_max = tl.zeros((ROWS, 1), tl.float32)
    total = tl.full((ROWS, 1), 1.0, tl.float32)
    if SOFTMAX and (BIASED or GROUPS > 1 or not RENORMALIZE):
        flat = tl.reshape(logits, (ROWS, BLOCK_GROUPS * BLOCK_SIZE))
        lse_max = tl.max(flat, axis=1, keep_dims=True)
        total = tl.sum(tl.exp(flat - lse_max), axis=1, keep_dims=True)
    if BIASED or GROUPS > 1:
        if SOFTMAX:
            score = tl.exp(logits - lse_max[:, :, None]) / total[:, :, None]
        else:
            score = 1.0 / (1.0 + tl.exp(-logits))
        if BIASED:
            score += tl.load(bias + expert * bias_col, mask=there, other=0.0).to(tl.float32)
            key = ordered(score)
        if GROUPS > 1:
            score = tl.where(score != score, float("inf"), score)
            chosen = best_groups(tl.where(there, score, float("-inf")), TOP_GROUPS)
            key = tl.where(chosen[:, :, None], key, TAKEN)
    key = tl.reshape(tl.where(there, key, TAKEN), (ROWS, BLOCK_GROUPS * BLOCK_SIZE))
    column, place = tl.arange(0, BLOCK_GROUPS * BLOCK_SIZE)[None, :], tl.arange(0, K)[None, :]
    found = tl.zeros((ROWS, K), tl.int32)
    for j in range(k):
        _, index = _top(key)
        key = tl.where(column == index[:, None], TAKEN, key)
        found = tl.where(place == j, index[:, None], found)
    found = found // BLOCK_SIZE * SIZE + found % BLOCK_SIZE
    to_store = (rows[:, None] < N) & (place < k)
    # Read again, by index: cheaper than to carry the value of every round along.
    c = tl.load(x + rows[:, None] * x_row + found.to(tl.int64) * x_col, mask=to_store, other=float("-inf")).to(tl.float32)
    if SOFTMAX and RENORMALIZE:
        w = tl.exp(c - tl.max(c, axis=1, keep_dims=True))
        w = w / tl.sum(w, axis=1, keep_dims=True)
    elif SOFTMAX:
        w = tl.exp(c - lse_max) / total
    else:
        w = 1.0 / (1.0 + tl.exp(-c))
        if RENORMALIZE:
            w = w / (tl.sum(tl.where(place < k, w, 0.0), axis=1, keep_dims=True) + 1e-20)
    offsets = rows[:, None] * k + place
    tl.store(weights + offsets, (w * scale).to(weights.dtype.element_ty), mask=to_store)
    tl.store(indices + offsets, found, mask=to_store)


def tile(E: int, groups: int, elements: Optional[int]) -> tuple[int, int, int]:
    """Rows, groups and experts per group of a program's tile: powers of two."""
    block_groups, block_size = triton.next_power_of_2(groups), triton.next_power_of_2(E // groups)
    return max(1, (elements or TILE) // (block_groups * block_size)), block_groups, block_size


def forward(
    logits: Tensor, k: int, scoring: str, groups: Optional[int], top_groups: Optional[int],
    bias: Optional[Tensor], renormalize: bool, scale: float, *, elements: Optional[int] = None, warps: Optional[int] = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    E = logits.shape[-1]
    flat = logits.reshape(-1, E)
    N = flat.shape[0]
    weights = torch.empty((*logits.shape[:-1], k), dtype=logits.dtype, device=logits.device)
    indices = torch.empty(weights.shape, dtype=torch.int32, device=logits.device)
    number = groups if groups is not None and top_groups != groups else 1  # all of the groups are no limit
    rows, block_groups, block_size = tile(E, number, elements)
    _forward[(triton.cdiv(N, rows),)](
        flat, bias if bias is not None else flat, weights, indices, N, k, *flat.stride(), 0 if bias is None else bias.stride(0), scale,
        ROWS=rows, GROUPS=number, SIZE=E // number, TOP_GROUPS=top_groups or 1, K=triton.next_power_of_2(k),
        BLOCK_GROUPS=block_groups, BLOCK_SIZE=block_size,
        SOFTMAX=scoring == "softmax", BIASED=bias is not None, RENORMALIZE=renormalize, num_warps=warps or NUM_WARPS,
    )  # fmt: skip
    return weights, indices


def supports(
    target: str, logits: Tensor, k: int, scoring: str, groups: Optional[int], top_groups: Optional[int],
    bias: Optional[Tensor], renormalize: bool, scale: float, *, elements: Optional[int] = None, warps: Optional[int] = None,
) -> str | None:  # fmt: skip
    E = logits.shape[-1]
    number = groups or 1
    held = triton.next_power_of_2(number) * triton.next_power_of_2(E // number)
    return f"E = {E} in {number} group(s): a row fits a program up to {WIDEST} experts" if held > WIDEST else None
