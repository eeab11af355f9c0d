"""rms_norm, backward, in Triton.

Where a row fits, one kernel: a fixed number of programs walk over the rows, write dx and keep their share of dweight in
registers; the shares are added at the end. So grad and x are read once. Longer rows, or a weight alone: a kernel each.
"""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdk_kernels.rms_norm.triton import tile

PROGRAMS_PER_PROCESSOR = 2
COLUMNS, STRIPE = 128, 32  # tile of the weight's own kernel: columns, rows read at once


@triton.jit
def _whole_rows(
    grad, x, weight, rstd, dx, shares, N, H, g_row, g_col, x_row, x_col, w_col, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    w = tl.load(weight + columns * w_col, mask=columns < H, other=0.0).to(tl.float32) + offset
    share = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(first * ROWS, N, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
        mask = (rows < N) & (columns < H)
        g = tl.load(grad + rows * g_row + columns * g_col, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(x + rows * x_row + columns * x_col, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(rstd + rows, mask=rows < N, other=0.0)
        n = values * scale
        gw = g * w
        mean = tl.sum(gw * n, axis=1, keep_dims=True) / H
        tl.store(dx + rows * H + columns, ((gw - n * mean) * scale).to(dx.dtype.element_ty), mask=mask)
        if WEIGHT:
            share += g * n
    if WEIGHT:
        tl.store(shares + first * H + columns, tl.sum(share, axis=0, keep_dims=True), mask=columns < H)


@triton.jit
def _long_rows(
    grad, x, weight, rstd, dx, H, g_row, g_col, x_row, x_col, w_col, offset, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK).to(tl.int64)
    scale = tl.load(rstd + row)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, H, BLOCK):
        c = start + columns
        g = tl.load(grad + row * g_row + c * g_col, mask=c < H, other=0.0).to(tl.float32)
        values = tl.load(x + row * x_row + c * x_col, mask=c < H, other=0.0).to(tl.float32)
        w = tl.load(weight + c * w_col, mask=c < H, other=0.0).to(tl.float32) + offset
        sums += g * w * values * scale
    mean = tl.sum(sums, axis=0) / H
    for start in range(0, H, BLOCK):
        c = start + columns
        g = tl.load(grad + row * g_row + c * g_col, mask=c < H, other=0.0).to(tl.float32)
        values = tl.load(x + row * x_row + c * x_col, mask=c < H, other=0.0).to(tl.float32)
        w = tl.load(weight + c * w_col, mask=c < H, other=0.0).to(tl.float32) + offset
        tl.store(dx + row * H + c, ((g * w - values * scale * mean) * scale).to(dx.dtype.element_ty), mask=c < H)


@triton.jit
def _weight_share(
    grad, x, rstd, shares, N, H, g_row, g_col, x_row, x_col, COLUMNS: tl.constexpr, STRIPE: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    first = tl.program_id(1).to(tl.int64)
    share = tl.zeros((STRIPE, COLUMNS), tl.float32)
    for start in range(first * STRIPE, N, tl.num_programs(1) * STRIPE):
        rows = start + tl.arange(0, STRIPE)[:, None].to(tl.int64)
        mask = (rows < N) & (columns < H)
        g = tl.load(grad + rows * g_row + columns * g_col, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(x + rows * x_row + columns * x_col, mask=mask, other=0.0).to(tl.float32)
        share += g * values * tl.load(rstd + rows, mask=rows < N, other=0.0)
    tl.store(shares + first * H + columns, tl.sum(share, axis=0, keep_dims=True), mask=columns < H)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; the simulator plays a small one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, needs: str
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    needed = needs.split(",")
    H = x.shape[-1]
    g, flat, scale = grad.reshape(-1, H), x.reshape(-1, H), rstd.reshape(-1)
    N = flat.shape[0]
    rows, block, warps = tile(H)
    whole = block >= H
    programs = min(triton.cdiv(N, rows), PROGRAMS_PER_PROCESSOR * processors(x.device))
    strides = (g.stride(0), g.stride(1), flat.stride(0), flat.stride(1))
    dx: Optional[Tensor] = None
    shares: Optional[Tensor] = None
    if "x" in needed:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if whole:
            together = "weight" in needed
            shares = torch.empty((programs, H), dtype=torch.float32, device=x.device) if together else None
            _whole_rows[(programs,)](
                g, flat, weight, scale, dx, shares, N, H, *strides, weight.stride(0), offset,
                ROWS=rows, BLOCK=block, WEIGHT=together, num_warps=warps,
            )  # fmt: skip
        else:
            _long_rows[(N,)](
                g, flat, weight, scale, dx, H, *strides, weight.stride(0), offset, BLOCK=block, num_warps=warps
            )
    if "weight" in needed and shares is None:
        blocks = triton.cdiv(H, COLUMNS)
        stripes = max(1, min(triton.cdiv(N, STRIPE), 4 * processors(x.device) // blocks))
        shares = torch.empty((stripes, H), dtype=torch.float32, device=x.device)
        _weight_share[(blocks, stripes)](g, flat, scale, shares, N, H, *strides, COLUMNS=COLUMNS, STRIPE=STRIPE)
    return dx, None if shares is None else shares.sum(0).to(weight.dtype)
