"""rms_norm, backward, in Triton.

Where a row fits, one kernel: a fixed number of programs walk over the rows, write dx and keep their share of dweight in
registers; the shares are added at the end. So grad and x are read once. Longer rows, or a weight alone: a kernel each.

`more` and the copy of dx serve a residual sum before the norm (add_rms_norm), where two gradients meet.
"""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdk_kernels.rms_norm.triton import TUNABLE as TUNABLE
from kdk_kernels.rms_norm.triton import tile

PROGRAMS_PER_PROCESSOR = 2
WIDEST_WITH_WEIGHT, PARTS = 8192, 8  # columns held at once beside their share of dweight; parts of a row with more
COLUMNS, STRIPE = 128, 32  # tile of the weight's own kernel: columns, rows read at once


@triton.jit
def _whole_rows(
    grad, x, weight, rstd, more, dx, dx_copy, shares, N, H, g_row, g_col, x_row, x_col, m_row, m_col, w_col, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, MORE: tl.constexpr, COPY: tl.constexpr,
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
        d = (gw - n * mean) * scale
        if MORE:
            d += tl.load(more + rows * m_row + columns * m_col, mask=mask).to(tl.float32)
        tl.store(dx + rows * H + columns, d.to(dx.dtype.element_ty), mask=mask)
        if COPY:
            tl.store(dx_copy + rows * H + columns, d.to(dx.dtype.element_ty), mask=mask)
        if WEIGHT:
            share += g * n
    if WEIGHT:
        tl.store(shares + first * H + columns, tl.sum(share, axis=0, keep_dims=True), mask=columns < H)


@triton.jit
def _whole_rows_in_parts(
    grad, x, weight, rstd, more, dx, dx_copy, shares, N, H, g_row, g_col, x_row, x_col, m_row, m_col, w_col, offset,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, MORE: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """As `_whole_rows` with WEIGHT, of rows that leave the registers no room beside their share of dweight: a row is read in PARTS,
    and again, from the cache, when its mean is known."""
    first = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK).to(tl.int64)
    share = (tl.zeros((BLOCK,), tl.float32),) * PARTS
    for row in range(first, N, tl.num_programs(0)):
        scale = tl.load(rstd + row)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, H, BLOCK):
            c = start + columns
            g = tl.load(grad + row * g_row + c * g_col, mask=c < H, other=0.0).to(tl.float32)
            values = tl.load(x + row * x_row + c * x_col, mask=c < H, other=0.0).to(tl.float32)
            w = tl.load(weight + c * w_col, mask=c < H, other=0.0).to(tl.float32) + offset
            sums += g * w * values * scale
        mean = tl.sum(sums, axis=0) / H
        for part in tl.static_range(PARTS):
            c = part * BLOCK + columns
            g = tl.load(grad + row * g_row + c * g_col, mask=c < H, other=0.0).to(tl.float32)
            values = tl.load(x + row * x_row + c * x_col, mask=c < H, other=0.0).to(tl.float32)
            w = tl.load(weight + c * w_col, mask=c < H, other=0.0).to(tl.float32) + offset
            n = values * scale
            d = (g * w - n * mean) * scale
            if MORE:
                d += tl.load(more + row * m_row + c * m_col, mask=c < H).to(tl.float32)
            tl.store(dx + row * H + c, d.to(dx.dtype.element_ty), mask=c < H)
            if COPY:
                tl.store(dx_copy + row * H + c, d.to(dx.dtype.element_ty), mask=c < H)
            share = share[:part] + (share[part] + g * n,) + share[part + 1 :]
    for part in tl.static_range(PARTS):
        c = part * BLOCK + columns
        tl.store(shares + first * H + c, share[part], mask=c < H)


@triton.jit
def _long_rows(
    grad, x, weight, rstd, more, dx, dx_copy, H, g_row, g_col, x_row, x_col, m_row, m_col, w_col, offset,
    BLOCK: tl.constexpr, MORE: tl.constexpr, COPY: tl.constexpr,
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
        g = tl.load(grad + row * g_row + c * g_col, mask=c < H).to(tl.float32)
        values = tl.load(x + row * x_row + c * x_col, mask=c < H).to(tl.float32)
        w = tl.load(weight + c * w_col, mask=c < H).to(tl.float32) + offset
        d = (g * w - values * scale * mean) * scale
        if MORE:
            d += tl.load(more + row * m_row + c * m_col, mask=c < H).to(tl.float32)
        tl.store(dx + row * H + c, d.to(dx.dtype.element_ty), mask=c < H)
        if COPY:
            tl.store(dx_copy + row * H + c, d.to(dx.dtype.element_ty), mask=c < H)


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


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, copies: int, weighted: bool,
    elements: Optional[int], warps: Optional[int], more: Optional[Tensor] = None,
) -> tuple[list[Tensor], Optional[Tensor]]:  # fmt: skip
    """dx, 0 to 2 `copies` of it, with `more` added before it is rounded; and dweight where it is wanted."""
    H = x.shape[-1]
    g, flat, scale = grad.reshape(-1, H), x.reshape(-1, H), rstd.reshape(-1)
    extra = None if more is None else more.reshape(-1, H)
    N = flat.shape[0]
    rows, block, warps = tile(H, elements, warps)
    programs = min(triton.cdiv(N, rows), PROGRAMS_PER_PROCESSOR * processors(x.device))
    strides = (*g.stride(), *flat.stride())
    dx = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(copies)]
    shares: Optional[Tensor] = None
    if copies:
        results = (dx[0], dx[1] if copies == 2 else None)
        layout = (*strides, *(extra.stride() if extra is not None else (0, 0)), weight.stride(0))
        flags = {"MORE": extra is not None, "COPY": copies == 2, "num_warps": warps}
        if block >= H:
            shares = torch.empty((programs, H), dtype=torch.float32, device=x.device) if weighted else None
            if weighted and block > WIDEST_WITH_WEIGHT:
                _whole_rows_in_parts[(programs,)](
                    g, flat, weight, scale, extra, *results, shares, N, H, *layout, offset,
                    BLOCK=block // PARTS, PARTS=PARTS, **flags,
                )  # fmt: skip
            else:
                _whole_rows[(programs,)](
                    g, flat, weight, scale, extra, *results, shares, N, H, *layout, offset,
                    ROWS=rows, BLOCK=block, WEIGHT=weighted, **flags,
                )  # fmt: skip
        else:
            _long_rows[(N,)](g, flat, weight, scale, extra, *results, H, *layout, offset, BLOCK=block, **flags)
    if weighted and shares is None:
        blocks = triton.cdiv(H, COLUMNS)
        stripes = max(1, min(triton.cdiv(N, STRIPE), 4 * processors(x.device) // blocks))
        shares = torch.empty((stripes, H), dtype=torch.float32, device=x.device)
        _weight_share[(blocks, stripes)](g, flat, scale, shares, N, H, *strides, COLUMNS=COLUMNS, STRIPE=STRIPE)
    return dx, None if shares is None else shares.sum(0).to(weight.dtype)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, needs: str,
    *, elements: Optional[int] = None, warps: Optional[int] = None,
) -> tuple[Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    needed = needs.split(",")
    dx, dweight = gradients(grad, x, weight, rstd, offset, int("x" in needed), "weight" in needed, elements, warps)
    return dx[0] if dx else None, dweight
