"""linear_cross_entropy, forward, in Triton: a program multiplies a tile of the logits and keeps the maximum and the sum of
exponentials of each of its rows; a second kernel merges the tiles of a row.
"""

import math
from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

GROUP = tl.constexpr(8)  # row blocks that take turns at one block of the vocabulary, so that both stay in L2
TUNABLE = {"columns": (64, 128, 256), "warps": (4, 8)}  # of a program's product
MERGED = 16  # rows that a merging program takes, TILES at a time
TILES = 128


@triton.jit
def place(row_blocks, column_blocks):
    """The block of rows and of columns of this program: neighbours share a few of both."""
    program = tl.program_id(0)
    first = program // (GROUP * column_blocks) * GROUP
    rows = tl.minimum(row_blocks - first, GROUP)
    inside = program % (GROUP * column_blocks)
    return first + inside % rows, inside // rows


@triton.jit
def logits(
    x, weight, bias, rows, columns, N, V, H, x_row, x_col, w_row, w_col, bias_step, softcap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """A tile in float32, and the tanh behind it where there is a softcap. Anything beyond N and V."""
    depth = tl.arange(0, DEPTH).to(tl.int64)
    left = x + rows[:, None] * x_row + depth[None, :] * x_col
    right = weight + columns[None, :] * w_row + depth[:, None] * w_col
    left_step, right_step = tl.full((), DEPTH, tl.int64) * x_col, tl.full((), DEPTH, tl.int64) * w_col
    z = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, H, DEPTH):
        a = tl.load(left, mask=(rows < N)[:, None] & (depth < H - start)[None, :], other=0.0)
        b = tl.load(right, mask=(columns < V)[None, :] & (depth < H - start)[:, None], other=0.0)
        z = tl.dot(a, b, z, input_precision=PRECISION)
        left += left_step
        right += right_step
    if BIAS:
        z += tl.load(bias + columns * bias_step, mask=columns < V, other=0.0).to(tl.float32)[None, :]
    t = z
    if SOFTCAP:
        t = libdevice.tanh(z / softcap)
        z = t * softcap
    return z, t


@triton.jit
def _tile(
    x, weight, bias, target, largest, sums, totals, hits,
    N, V, H, x_row, x_col, w_row, w_col, bias_step, target_step, softcap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(V, COLUMNS)
    i, j = place(tl.cdiv(N, ROWS), blocks)
    rows = i.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = j.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    z, _ = logits(
        x, weight, bias, rows, columns, N, V, H, x_row, x_col, w_row, w_col, bias_step, softcap,
        ROWS, COLUMNS, DEPTH, PRECISION, BIAS, SOFTCAP,
    )  # fmt: skip
    inside = (columns < V)[None, :]
    part = rows * blocks + j
    if TOTAL:
        tl.store(totals + part, tl.sum(tl.where(inside, z, 0.0), axis=1), mask=rows < N)
    label = tl.load(target + rows * target_step, mask=rows < N, other=-1)
    here = columns[None, :] == label[:, None]
    found = (rows < N) & (label >= j * COLUMNS) & (label < tl.minimum(V, (j + 1) * COLUMNS))
    tl.store(hits + rows, tl.sum(tl.where(here, z, 0.0), axis=1), mask=found)
    z = tl.where(inside, z, float("-inf"))
    top = tl.max(z, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)  # a row of -inf alone: its sum is 0
    tl.store(largest + part, top, mask=rows < N)
    tl.store(sums + part, tl.sum(tl.exp(z - shift[:, None]), axis=1), mask=rows < N)


@triton.jit
def _merge(
    largest, sums, totals, hits, target, loss, lse, N, V, blocks, target_step, ignore_index, label_smoothing, z_loss,
    ROWS: tl.constexpr, TILES: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tiles = tl.arange(0, TILES)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for start in range(0, blocks, TILES):
        mask = (rows < N)[:, None] & (start + tiles < blocks)[None, :]
        at = rows[:, None] * blocks + (start + tiles)[None, :]
        top = tl.maximum(top, tl.max(tl.load(largest + at, mask=mask, other=float("-inf")), axis=1))
    shift = tl.where(top == float("-inf"), 0.0, top)
    sum = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, blocks, TILES):
        mask = (rows < N)[:, None] & (start + tiles < blocks)[None, :]
        at = rows[:, None] * blocks + (start + tiles)[None, :]
        part = tl.load(largest + at, mask=mask, other=float("-inf"))
        sum += tl.sum(tl.load(sums + at, mask=mask, other=0.0) * tl.exp(part - shift[:, None]), axis=1)
        if TOTAL:
            total += tl.sum(tl.load(totals + at, mask=mask, other=0.0), axis=1)
    result = shift + tl.log(sum)
    tl.store(lse + rows, result, mask=rows < N)
    label = tl.load(target + rows * target_step, mask=rows < N, other=-1)
    known = (label >= 0) & (label < V)
    hit = tl.load(hits + rows, mask=(rows < N) & known, other=0.0)
    value = result - (1.0 - label_smoothing) * tl.where(known, hit, float("nan"))
    if TOTAL:
        value -= label_smoothing / V * total
    value += tl.where(z_loss != 0.0, z_loss * result * result, 0.0)
    tl.store(loss + rows, tl.where(label == ignore_index, 0.0, value), mask=rows < N)


def tile(dtype: torch.dtype, columns: Optional[int], warps: Optional[int]) -> dict[str, Any]:
    """Rows, columns and depth of a program's product, and how it runs. float32 is multiplied as float32, without tensor cores."""
    if dtype == torch.float32:
        return {"ROWS": 64, "COLUMNS": columns or 64, "DEPTH": 32, "PRECISION": "ieee", "num_warps": warps or 4, "num_stages": 2}
    return {"ROWS": 128, "COLUMNS": columns or 128, "DEPTH": 64, "PRECISION": None, "num_warps": warps or 8, "num_stages": 3}


def forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor],
    ignore_index: int,
    label_smoothing: float,
    softcap: Optional[float],
    z_loss: float,
    *,
    columns: Optional[int] = None,
    warps: Optional[int] = None,
) -> tuple[Tensor, Tensor]:
    V, H = weight.shape
    flat, labels = x.reshape(-1, H), target.reshape(-1)
    N, how = flat.shape[0], tile(x.dtype, columns, warps)
    blocks = triton.cdiv(V, how["COLUMNS"])
    loss, lse = (torch.empty(target.shape, dtype=torch.float32, device=x.device) for _ in range(2))
    largest, sums = (torch.empty((N, blocks), dtype=torch.float32, device=x.device) for _ in range(2))
    totals = torch.empty_like(sums) if label_smoothing else sums
    hits = torch.empty(N, dtype=torch.float32, device=x.device)
    _tile[(triton.cdiv(N, how["ROWS"]) * blocks,)](
        flat, weight, weight if bias is None else bias, labels, largest, sums, totals, hits, N, V, H,
        *flat.stride(), *weight.stride(), 0 if bias is None else bias.stride(0), labels.stride(0), softcap or math.inf,
        BIAS=bias is not None, SOFTCAP=softcap is not None, TOTAL=label_smoothing != 0, **how,
    )  # fmt: skip
    _merge[(triton.cdiv(N, MERGED),)](
        largest, sums, totals, hits, labels, loss, lse, N, V, blocks, labels.stride(0), ignore_index, label_smoothing, z_loss,
        ROWS=MERGED, TILES=TILES, TOTAL=label_smoothing != 0,
    )  # fmt: skip
    return loss, lse
