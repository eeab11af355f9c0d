"""add_rms_norm, forward, in Triton: a tile of whole rows per program where a row fits, else two passes over it."""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdk_kernels.rms_norm.triton import TUNABLE as TUNABLE
from kdk_kernels.rms_norm.triton import tile


@triton.jit
def rounded_sum(x, residual, mask):
    """The sum at two tiles of addresses, in the dtype of x: what is stored is also what is normalised."""
    total = tl.load(x, mask=mask, other=0.0).to(tl.float32) + tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    return total.to(x.dtype.element_ty)


@triton.jit
def _forward(
    x, residual, weight, y, new_residual, rstd, N, H, x_row, x_col, r_row, r_col, w_col, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    x_rows, residual_rows = x + rows * x_row, residual + rows * r_row
    if WHOLE:
        mask = (rows < N) & (columns < H)
        total = rounded_sum(x_rows + columns * x_col, residual_rows + columns * r_col, mask)
        tl.store(new_residual + rows * H + columns, total, mask=mask)
        values = total.to(tl.float32)
        square = tl.sum(values * values, axis=1, keep_dims=True)
        scale = 1.0 / tl.sqrt_rn(square / H + eps)
        w = tl.load(weight + columns * w_col, mask=columns < H).to(tl.float32) + offset
        tl.store(y + rows * H + columns, (values * scale * w).to(y.dtype.element_ty), mask=mask)
    else:  # a row for each program
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, H, BLOCK):
            c = start + columns
            total = rounded_sum(x_rows + c * x_col, residual_rows + c * r_col, c < H)
            tl.store(new_residual + rows * H + c, total, mask=c < H)
            values = total.to(tl.float32)
            sums += values * values
        square = tl.sum(sums, axis=1, keep_dims=True)
        scale = 1.0 / tl.sqrt_rn(square / H + eps)
        for start in range(0, H, BLOCK):
            c = start + columns
            # Added again: threads do not see what others have just written without a barrier.
            values = rounded_sum(x_rows + c * x_col, residual_rows + c * r_col, c < H).to(tl.float32)
            w = tl.load(weight + c * w_col, mask=c < H).to(tl.float32) + offset
            tl.store(y + rows * H + c, (values * scale * w).to(y.dtype.element_ty), mask=c < H)
    tl.store(rstd + rows, scale, mask=rows < N)


def forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float,
    *, elements: Optional[int] = None, warps: Optional[int] = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    H = x.shape[-1]
    flat, flat_residual = x.reshape(-1, H), residual.reshape(-1, H)
    N = flat.shape[0]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows, block, warps = tile(H, elements, warps)
    _forward[(triton.cdiv(N, rows),)](
        flat, flat_residual, weight, y, new_residual, rstd, N, H,
        *flat.stride(), *flat_residual.stride(), weight.stride(0), eps, offset,
        ROWS=rows, BLOCK=block, WHOLE=block >= H, num_warps=warps,
    )  # fmt: skip
    return y, new_residual, rstd
