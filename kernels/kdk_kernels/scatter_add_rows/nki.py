"""scatter_add_rows in NKI: 128 rows at a time, in the order of their numbers (sorted outside), added into float32 by indirect DMA.

An indirect DMA must not hit one address twice. In that order equal numbers are neighbours: within a tile every row first takes up
those behind it of the same number, at a distance of 1, 2, 4 ... 64, and the first of them then stands for all. A row that takes up
nothing is left as it is by a predicate, not multiplied by zero: its neighbour may be infinite.
"""

import nki
import nki.isa as nisa
import nki.language as nl
import torch
from torch import Tensor

from kdk.backends.nki.launch import run

ROWS = 128
CHUNK = 2048  # columns of a tile
ZEROS = 4096  # elements of a partition that are cleared at a time


def _clear(table):
    """Zeros in all of a tensor of HBM."""
    R, H = table.shape
    zeros = nl.ndarray((ROWS, ZEROS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0.0)
    for start in range(0, R, ROWS):
        rows = min(ROWS, R - start)
        for first in range(0, H, ZEROS):
            width = min(ZEROS, H - first)
            nisa.dma_copy(dst=table[start : start + rows, first : first + width], src=zeros[0:rows, 0:width])


def _take_up(tile, behind):
    """Every row plus those of the same number behind it. behind (rows, 1): how many there are in the tile."""
    rows, width = tile.shape
    distance = 1
    while distance < rows:
        near = rows - distance
        other = nl.ndarray((near, width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=other, src=tile[distance:rows])
        same = nl.ndarray((near, width), dtype=nl.uint8, buffer=nl.sbuf)
        ones = nl.ndarray((near, width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=ones, value=float(distance))
        nisa.tensor_scalar(dst=same, data=ones, op0=nl.less_equal, operand0=behind[0:near])
        added = nl.ndarray((near, width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=added, data1=tile[0:near], data2=other, op=nl.add)
        nisa.tensor_copy_predicated(dst=tile[0:near], src=added, predicate=same)
        distance = 2 * distance


@nki.jit
def scatter_add_rows_kernel(rows, order, target, behind, num_rows):
    """rows (N, H); order, target (N, 1) int32: the place's row, and the row of the result, num_rows for none; behind (N, 1)."""
    N, H = rows.shape
    out = nl.ndarray((num_rows, H), dtype=rows.dtype, buffer=nl.shared_hbm)
    sums = out if rows.dtype == nl.float32 else nl.ndarray((num_rows, H), dtype=nl.float32, buffer=nl.hbm)
    _clear(sums)
    for start in range(0, N, ROWS):
        here = min(ROWS, N - start)
        places = nl.ndarray((here, 1), dtype=order.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=places, src=order[start : start + here])
        to = nl.ndarray((here, 1), dtype=target.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=to, src=target[start : start + here])
        followers = nl.ndarray((here, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=followers, src=behind[start : start + here])
        for first in range(0, H, CHUNK):
            width = min(CHUNK, H - first)
            tile = nl.ndarray((here, width), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=tile, src=rows.ap([[H, here], [1, width]], offset=first, vector_offset=places))
            _take_up(tile, followers)
            old = nl.ndarray((here, width), dtype=nl.float32, buffer=nl.sbuf)
            nisa.memset(dst=old, value=0.0)
            into = sums.ap([[H, here], [1, width]], offset=first, vector_offset=to)
            nisa.dma_copy(dst=old, src=into, oob_mode=nisa.oob_mode.skip)
            nisa.tensor_tensor(dst=tile, data1=tile, data2=old, op=nl.add)
            nisa.dma_copy(dst=into, src=tile, oob_mode=nisa.oob_mode.skip)
    if rows.dtype != nl.float32:
        for start in range(0, num_rows, ROWS):
            here = min(ROWS, num_rows - start)
            for first in range(0, H, CHUNK):
                width = min(CHUNK, H - first)
                tile = nl.ndarray((here, width), dtype=nl.float32, buffer=nl.sbuf)
                nisa.dma_copy(dst=tile, src=sums[start : start + here, first : first + width])
                rounded = nl.ndarray((here, width), dtype=rows.dtype, buffer=nl.sbuf)
                nisa.tensor_copy(dst=rounded, src=tile)
                nisa.dma_copy(dst=out[start : start + here, first : first + width], src=rounded)
    return out


def forward(index: Tensor, rows: Tensor, num_rows: int, deterministic: bool) -> Tensor:
    numbers, order = index.reshape(-1).sort(stable=True)
    place = torch.arange(numbers.numel(), device=index.device)
    leads = place % ROWS == 0
    leads[1:] |= numbers[1:] != numbers[:-1]
    # Where the run of equal numbers ends, or the tile: the next place that leads, seen from behind.
    after = torch.where(leads, place, numbers.numel()).flip(0).cummin(0).values.flip(0)
    end = torch.cat([after[1:], after.new_full((1,), numbers.numel())])
    target = torch.where(leads, numbers, num_rows).to(torch.int32)
    behind = (end - place - 1).to(torch.float32)
    columns = order.to(torch.int32)[:, None], target[:, None], behind[:, None]
    (out,) = run(scatter_add_rows_kernel, rows.reshape(-1, rows.shape[-1]), *columns, num_rows)
    return out
