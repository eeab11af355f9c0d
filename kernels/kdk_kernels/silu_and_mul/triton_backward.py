"""Gradients of SiLU-and-multiply in Triton; a gradient that is not needed is neither computed nor stored."""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdk_kernels.silu_and_mul.triton import NUM_WARPS, blocks, rows_and_columns
from kdk_kernels.silu_and_mul.triton import TUNABLE as TUNABLE


@triton.jit
def silu_and_mul_backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    rows,
    columns,
    grad_row_stride,
    grad_column_stride,
    gate_row_stride,
    gate_column_stride,
    up_row_stride,
    up_column_stride,
    NEEDS_GATE: tl.constexpr,
    NEEDS_UP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    column_blocks = tl.cdiv(columns, BLOCK_COLUMNS)
    # int64: as in the forward kernel.
    row_block = (tl.program_id(0) // column_blocks).to(tl.int64)
    column_block = (tl.program_id(0) % column_blocks).to(tl.int64)
    row = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = column_block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    at = row * columns + column

    grad = tl.load(grad_ptr + row * grad_row_stride + column * grad_column_stride, mask=inside)
    gate = tl.load(gate_ptr + row * gate_row_stride + column * gate_column_stride, mask=inside)
    grad = grad.to(tl.float32)
    gate = gate.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    if NEEDS_GATE:
        up = tl.load(up_ptr + row * up_row_stride + column * up_column_stride, mask=inside)
        # 1 - sigmoid would lose the small values that gate multiplies.
        slope = sigmoid * (1.0 + gate / (1.0 + tl.exp(gate)))
        grad_gate = grad * up.to(tl.float32) * slope
        tl.store(grad_gate_ptr + at, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=inside)
    if NEEDS_UP:
        grad_up = grad * (gate * sigmoid)
        tl.store(grad_up_ptr + at, grad_up.to(grad_up_ptr.dtype.element_ty), mask=inside)


def backward(
    grad: Tensor, gate: Tensor, up: Optional[Tensor], needs: str, *, elements: Optional[int] = None, warps: Optional[int] = None
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    names = needs.split(",")
    needs_gate, needs_up = "gate" in names, "up" in names
    shape, dtype, device = gate.shape, gate.dtype, gate.device
    grad_gate = torch.empty(shape, dtype=dtype, device=device) if needs_gate else None
    grad_up = torch.empty(shape, dtype=dtype, device=device) if needs_up else None
    if up is None or not needs_gate:
        up = gate  # never read
    grad, gate, up = rows_and_columns(grad, gate, up)
    grid, block_rows, block_columns = blocks(gate.shape[0], gate.shape[1], elements)
    silu_and_mul_backward_kernel[grid](
        grad,
        gate,
        up,
        grad_gate,
        grad_up,
        *gate.shape,
        *grad.stride(),
        *gate.stride(),
        *up.stride(),
        NEEDS_GATE=needs_gate,
        NEEDS_UP=needs_up,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        num_warps=warps or NUM_WARPS,
    )
    return grad_gate, grad_up
