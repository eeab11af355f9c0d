"""scatter_add_rows for GPUs: atomics in float32, or sorted numbers and sums whose order is always the same.

Deterministic, the rows stand in the order of their numbers (the sort is made outside, of the index alone), so that one row of the
result is a run of them. A run may be one row or all of them: pieces of PIECE places that lie within one run are summed first, side
by side; then one program per row of the result adds what lies before the first whole piece, the pieces, and what lies behind.
"""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdk_kernels.gather_rows.triton import tile

PIECE = 64  # places of the sorted index
WIDEST = 1024  # columns of a program
NUM_WARPS = 4
TUNABLE = {"columns": (128, 256, 512, 1024, 2048), "warps": (1, 2, 4, 8)}  # of a program


def forward(
    index: Tensor, rows: Tensor, num_rows: int, deterministic: bool, *, columns: Optional[int] = None, warps: Optional[int] = None
) -> Tensor:
    flat, values = index.reshape(-1), rows.reshape(-1, rows.shape[-1])
    if deterministic:
        return _sorted(flat, values, num_rows, columns or WIDEST, warps or NUM_WARPS)
    N, H = values.shape
    sums = torch.zeros((num_rows, H), dtype=torch.float32, device=rows.device)
    tall, wide = tile(N, H, None, columns or WIDEST)
    _add[(triton.cdiv(N, tall), triton.cdiv(H, wide))](
        flat, values, sums, N, num_rows, H, flat.stride(0), *values.stride(), ROWS=tall, BLOCK=wide, num_warps=warps or NUM_WARPS
    )
    if rows.dtype == torch.float32:
        return sums
    out = torch.empty((num_rows, H), dtype=rows.dtype, device=rows.device)
    _round[(triton.cdiv(out.numel(), 2048),)](sums, out, out.numel(), BLOCK=2048, num_warps=4)
    return out


def _sorted(flat: Tensor, values: Tensor, num_rows: int, most_columns: int, warps: int) -> Tensor:
    N, H = values.shape
    numbers, order = flat.sort(stable=True)
    first = torch.searchsorted(numbers, torch.arange(num_rows + 1, device=flat.device, dtype=numbers.dtype))
    pieces = torch.empty((max(N // PIECE, 1), H), dtype=torch.float32, device=values.device)
    out = torch.empty((num_rows, H), dtype=values.dtype, device=values.device)
    block = min(triton.next_power_of_2(H), most_columns)
    columns = triton.cdiv(H, block)
    how = {"PIECE": PIECE, "BLOCK": block, "num_warps": warps}
    if N >= PIECE:
        _sum_pieces[(N // PIECE, columns)](numbers, order, values, pieces, H, *values.stride(), **how)
    _sum_runs[(num_rows, columns)](first, order, values, pieces, out, H, *values.stride(), **how)
    return out


@triton.jit
def _add(index, rows, sums, N, R, H, index_step, row_step, col_step, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    to_row = tl.load(index + places * index_step, mask=places < N, other=0).to(tl.int64)
    # A number out of range is the caller's mistake; it must not write into somebody else's memory.
    mask = ((places < N) & (to_row >= 0) & (to_row < R))[:, None] & (columns < H)
    values = tl.load(rows + places[:, None] * row_step + columns * col_step, mask=mask, other=0.0).to(tl.float32)
    tl.atomic_add(sums + to_row[:, None] * H + columns, values, mask=mask, sem="relaxed")


@triton.jit
def _round(sums, out, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(sums + places, mask=places < count)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=places < count)


@triton.jit
def _sum_places(order, rows, start, end, row_step, col_step, columns, inside, BLOCK: tl.constexpr):
    """The sum of the rows at the places from start to end, one after the other."""
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(start, end):
        row = tl.load(order + place)
        total += tl.load(rows + row * row_step + columns * col_step, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _sum_pieces(numbers, order, rows, pieces, H, row_step, col_step, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    piece = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = piece * PIECE
    if tl.load(numbers + start) == tl.load(numbers + start + PIECE - 1):  # all of one run
        inside = columns < H
        total = _sum_places(order, rows, start, start + PIECE, row_step, col_step, columns, inside, BLOCK)
        tl.store(pieces + piece * H + columns, total, mask=inside)


@triton.jit
def _sum_runs(first, order, rows, pieces, out, H, row_step, col_step, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    start, end = tl.load(first + row), tl.load(first + row + 1)
    whole, last = (start + PIECE - 1) // PIECE, end // PIECE  # the pieces that lie within the run
    head = tl.minimum(whole * PIECE, end)
    total = _sum_places(order, rows, start, head, row_step, col_step, columns, inside, BLOCK)
    for piece in range(whole, last):
        total += tl.load(pieces + piece * H + columns, mask=inside, other=0.0)
    tail = tl.maximum(last * PIECE, head)
    total += _sum_places(order, rows, tail, end, row_step, col_step, columns, inside, BLOCK)
    tl.store(out + row * H + columns, total.to(out.dtype.element_ty), mask=inside)
