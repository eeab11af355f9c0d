"""add_rms_norm_dynamic_quant in Triton: a tile of whole rows per program where a row fits, else three passes over it."""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdk_kernels.add_rms_norm.triton import rounded_sum
from kdk_kernels.rms_norm.triton import TUNABLE as TUNABLE
from kdk_kernels.rms_norm.triton import tile
from kdk_kernels.rms_norm_dynamic_quant.reference import SMALLEST, largest_of
from kdk_kernels.rms_norm_dynamic_quant.triton import inverse_scale, refused_format, rounded, row_peak


@triton.jit
def _forward(
    x, residual, weight, q, scale, new_residual, N, H, x_row, x_col, r_row, r_col, w_col, eps, offset,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, INTEGER: tl.constexpr,
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
        rstd = 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=1, keep_dims=True) / H + eps)
        w = tl.load(weight + columns * w_col, mask=columns < H, other=0.0).to(tl.float32) + offset
        y = tl.where(mask, values * rstd * w, 0.0)
        size, inverse = inverse_scale(row_peak(y), LARGEST, SMALLEST)
        tl.store(q + rows * H + columns, rounded(y * inverse, q, INTEGER), mask=mask)
    else:  # a row for each program; the sum is added again in each pass: threads do not see what others have just written
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, H, BLOCK):
            c = start + columns
            total = rounded_sum(x_rows + c * x_col, residual_rows + c * r_col, c < H)
            tl.store(new_residual + rows * H + c, total, mask=c < H)
            values = total.to(tl.float32)
            sums += values * values
        rstd = 1.0 / tl.sqrt_rn(tl.sum(sums, axis=1, keep_dims=True) / H + eps)
        peak = tl.zeros((ROWS, 1), tl.float32)
        for start in range(0, H, BLOCK):
            c = start + columns
            values = rounded_sum(x_rows + c * x_col, residual_rows + c * r_col, c < H).to(tl.float32)
            w = tl.load(weight + c * w_col, mask=c < H, other=0.0).to(tl.float32) + offset
            here = row_peak(tl.where(c < H, values * rstd * w, 0.0))
            peak = tl.where((here > peak) | (here != here), here, peak)
        size, inverse = inverse_scale(peak, LARGEST, SMALLEST)
        for start in range(0, H, BLOCK):
            c = start + columns
            values = rounded_sum(x_rows + c * x_col, residual_rows + c * r_col, c < H).to(tl.float32)
            w = tl.load(weight + c * w_col, mask=c < H, other=0.0).to(tl.float32) + offset
            tl.store(q + rows * H + c, rounded(values * rstd * w * inverse, q, INTEGER), mask=c < H)
    tl.store(scale + rows, size, mask=rows < N)


def forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype,
    *, elements: Optional[int] = None, warps: Optional[int] = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    H = x.shape[-1]
    flat, flat_residual = x.reshape(-1, H), residual.reshape(-1, H)
    N = flat.shape[0]
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    new_residual = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, block, warps = tile(H, elements, warps)
    _forward[(triton.cdiv(N, rows),)](
        flat, flat_residual, weight, q, scale, new_residual, N, H,
        *flat.stride(), *flat_residual.stride(), weight.stride(0), eps, offset,
        LARGEST=largest_of(dtype), SMALLEST=SMALLEST, INTEGER=dtype == torch.int8,
        ROWS=rows, BLOCK=block, WHOLE=block >= H, num_warps=warps,
    )  # fmt: skip
    return q, scale, new_residual


def supports(
    target: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype,
    *, elements: Optional[int] = None, warps: Optional[int] = None,
) -> Optional[str]:  # fmt: skip
    return refused_format(target, dtype)
