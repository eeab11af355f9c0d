"""gather_rows for GPUs: a tile of rows and columns per program. The order of the rows is the index's; caches do the rest."""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements of a program's tile
WIDEST = 1024  # columns of it
NUM_WARPS = 4
TUNABLE = {"elements": (1024, 2048, 4096, 8192), "warps": (1, 2, 4, 8)}  # of a program's tile; of a program


@triton.jit
def _gather(
    table, index, out, N, R, H, table_row, table_col, index_step,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    from_row = tl.load(index + rows * index_step, mask=rows < N, other=0).to(tl.int64)
    # A number out of range is the caller's mistake; it must not become a fault that ends the process.
    exists = (rows < N) & (from_row >= 0) & (from_row < R)
    mask = exists[:, None] & (columns < H)
    values = tl.load(table + from_row[:, None] * table_row + columns * table_col, mask=mask, other=0.0)
    tl.store(out + rows[:, None] * H + columns, values, mask=(rows < N)[:, None] & (columns < H))


def tile(N: int, H: int, elements: Optional[int], widest: int = WIDEST) -> tuple[int, int]:
    """Rows and columns of a program's tile."""
    block = min(triton.next_power_of_2(H), widest)
    return min((elements or TILE) // block, triton.next_power_of_2(N), 64), block


def forward(table: Tensor, index: Tensor, *, elements: Optional[int] = None, warps: Optional[int] = None) -> Tensor:
    (R, H), flat = table.shape, index.reshape(-1)
    N = flat.shape[0]
    out = torch.empty((*index.shape, H), dtype=table.dtype, device=table.device)
    rows, block = tile(N, H, elements)
    _gather[(triton.cdiv(N, rows), triton.cdiv(H, block))](
        table, flat, out, N, R, H, *table.stride(), flat.stride(0), ROWS=rows, BLOCK=block, num_warps=warps or NUM_WARPS
    )
    return out
