"""rms_norm, forward, in Triton: a tile of whole rows per program where a row fits, else two passes over it."""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 16384  # columns a program holds at once: 16 warps x 32 values a thread; fewer have 16 values a thread
TILE = 4096  # elements of a program's tile when rows are short
TUNABLE = {"elements": (1024, 2048, 4096, 8192), "warps": (1, 2, 4, 8, 16, 32)}  # of a program's tile when rows are short; of a program


@triton.jit
def _forward(
    x, weight, y, rstd, N, H, x_row, x_col, w_col, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    if WHOLE:
        mask = (rows < N) & (columns < H)
        values = tl.load(x + rows * x_row + columns * x_col, mask=mask, other=0.0).to(tl.float32)
        square = tl.sum(values * values, axis=1, keep_dims=True)
        scale = 1.0 / tl.sqrt_rn(square / H + eps)
        w = tl.load(weight + columns * w_col, mask=columns < H).to(tl.float32) + offset
        tl.store(y + rows * H + columns, (values * scale * w).to(y.dtype.element_ty), mask=mask)
    else:  # a row for each program
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, H, BLOCK):
            c = start + columns
            values = tl.load(x + rows * x_row + c * x_col, mask=c < H, other=0.0).to(tl.float32)
            sums += values * values
        square = tl.sum(sums, axis=1, keep_dims=True)
        scale = 1.0 / tl.sqrt_rn(square / H + eps)
        for start in range(0, H, BLOCK):
            c = start + columns
            values = tl.load(x + rows * x_row + c * x_col, mask=c < H).to(tl.float32)
            w = tl.load(weight + c * w_col, mask=c < H).to(tl.float32) + offset
            tl.store(y + rows * H + c, (values * scale * w).to(y.dtype.element_ty), mask=c < H)
    tl.store(rstd + rows, scale, mask=rows < N)


def tile(H: int, elements: Optional[int], warps: Optional[int]) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps: given, or what suits the row."""
    block = min(triton.next_power_of_2(H), WIDEST)
    rows = max(1, (elements or TILE) // block)
    return rows, block, warps or max(4, min(16, rows * block // 512))


def forward(
    x: Tensor, weight: Tensor, eps: float, offset: float, *, elements: Optional[int] = None, warps: Optional[int] = None
) -> tuple[Tensor, Tensor]:
    H = x.shape[-1]
    flat = x.reshape(-1, H)
    N = flat.shape[0]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows, block, warps = tile(H, elements, warps)
    _forward[(triton.cdiv(N, rows),)](
        flat, weight, y, rstd, N, H, flat.stride(0), flat.stride(1), weight.stride(0), eps, offset,
        ROWS=rows, BLOCK=block, WHOLE=block >= H, num_warps=warps,
    )  # fmt: skip
    return y, rstd
