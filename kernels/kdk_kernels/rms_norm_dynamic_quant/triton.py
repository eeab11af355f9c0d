"""rms_norm_dynamic_quant in Triton: a tile of whole rows per program where a row fits, else three passes over it."""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdk_kernels.rms_norm.triton import TUNABLE as TUNABLE
from kdk_kernels.rms_norm.triton import tile
from kdk_kernels.rms_norm_dynamic_quant.reference import SMALLEST, largest_of

OLD = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_87")  # no conversion to float8_e4m3fn


@triton.jit
def row_peak(y):
    """max|y| of every row, NaN where there is one: tl.max passes over them."""
    nan = tl.sum((y != y).to(tl.int32), axis=1, keep_dims=True)
    return tl.where(nan > 0, float("nan"), tl.max(tl.abs(y), axis=1, keep_dims=True))


@triton.jit
def inverse_scale(peak, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    """(scale, the number that rows are multiplied by). A comparison with NaN is false: it stays."""
    peak = tl.where(peak < SMALLEST, SMALLEST, peak)
    return tl.div_rn(peak, peak * 0.0 + LARGEST), tl.div_rn(peak * 0.0 + LARGEST, peak)


@triton.jit
def rounded(y, q, INTEGER: tl.constexpr):
    """To the dtype of q; to int8 by way of the float32 numbers whose last place is 1: ties to even, as the hardware adds."""
    if INTEGER:
        y = (y + 12582912.0) - 12582912.0
        y = tl.where(y == y, y, 0.0)
    return y.to(q.dtype.element_ty)


@triton.jit
def _forward(
    x, weight, q, scale, N, H, x_row, x_col, w_col, eps, offset,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, INTEGER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    if WHOLE:
        mask = (rows < N) & (columns < H)
        values = tl.load(x + rows * x_row + columns * x_col, mask=mask, other=0.0).to(tl.float32)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=1, keep_dims=True) / H + eps)
        w = tl.load(weight + columns * w_col, mask=columns < H, other=0.0).to(tl.float32) + offset
        y = tl.where(mask, values * rstd * w, 0.0)
        size, inverse = inverse_scale(row_peak(y), LARGEST, SMALLEST)
        tl.store(q + rows * H + columns, rounded(y * inverse, q, INTEGER), mask=mask)
    else:  # a row for each program
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, H, BLOCK):
            c = start + columns
            values = tl.load(x + rows * x_row + c * x_col, mask=c < H, other=0.0).to(tl.float32)
            sums += values * values
        rstd = 1.0 / tl.sqrt_rn(tl.sum(sums, axis=1, keep_dims=True) / H + eps)
        peak = tl.zeros((ROWS, 1), tl.float32)
        for start in range(0, H, BLOCK):
            c = start + columns
            values = tl.load(x + rows * x_row + c * x_col, mask=c < H, other=0.0).to(tl.float32)
            w = tl.load(weight + c * w_col, mask=c < H, other=0.0).to(tl.float32) + offset
            here = row_peak(tl.where(c < H, values * rstd * w, 0.0))
            peak = tl.where((here > peak) | (here != here), here, peak)
        size, inverse = inverse_scale(peak, LARGEST, SMALLEST)
        for start in range(0, H, BLOCK):
            c = start + columns
            values = tl.load(x + rows * x_row + c * x_col, mask=c < H, other=0.0).to(tl.float32)
            w = tl.load(weight + c * w_col, mask=c < H, other=0.0).to(tl.float32) + offset
            tl.store(q + rows * H + c, rounded(values * rstd * w * inverse, q, INTEGER), mask=c < H)
    tl.store(scale + rows, size, mask=rows < N)


def forward(
    x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype,
    *, elements: Optional[int] = None, warps: Optional[int] = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    H = x.shape[-1]
    flat = x.reshape(-1, H)
    N = flat.shape[0]
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows, block, warps = tile(H, elements, warps)
    _forward[(triton.cdiv(N, rows),)](
        flat, weight, q, scale, N, H, flat.stride(0), flat.stride(1), weight.stride(0), eps, offset,
        LARGEST=largest_of(dtype), SMALLEST=SMALLEST, INTEGER=dtype == torch.int8,
        ROWS=rows, BLOCK=block, WHOLE=block >= H, num_warps=warps,
    )  # fmt: skip
    return q, scale


def supports(
    target: str, x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype,
    *, elements: Optional[int] = None, warps: Optional[int] = None,
) -> Optional[str]:  # fmt: skip
    return refused_format(target, dtype)


def refused_format(target: str, dtype: torch.dtype) -> Optional[str]:
    """Why a chip lacks a format, or None."""
    return f"{target} has no float8_e4m3fn; float8_e5m2 and int8 work" if dtype == torch.float8_e4m3fn and target in OLD else None
