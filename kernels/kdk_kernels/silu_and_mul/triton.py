"""SiLU-and-multiply in Triton: one program computes a block of rows and columns."""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # per program: with 4 warps 16 a thread, so two 16-byte loads of bfloat16 an input are in flight
NUM_WARPS = 4
TUNABLE = {"elements": (1024, 2048, 4096, 8192), "warps": (1, 2, 4, 8, 16)}  # of a program


@triton.jit
def silu_and_mul_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    rows,
    columns,
    gate_row_stride,
    gate_column_stride,
    up_row_stride,
    up_column_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    column_blocks = tl.cdiv(columns, BLOCK_COLUMNS)
    # int64: a row times its stride passes 2^31 for long sequences, and a collapsed tensor has one very long row.
    row_block = (tl.program_id(0) // column_blocks).to(tl.int64)
    column_block = (tl.program_id(0) % column_blocks).to(tl.int64)
    row = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = column_block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)

    gate = tl.load(gate_ptr + row * gate_row_stride + column * gate_column_stride, mask=inside)
    up = tl.load(up_ptr + row * up_row_stride + column * up_column_stride, mask=inside)
    gate = gate.to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def rows_and_columns(*tensors: Tensor) -> list[Tensor]:
    """The tensors as matrices; views, unless the leading dimensions have no common stride.

    Contiguous tensors become one long row: no lane idles at the end of each row, and loads stay wide for any H.
    """
    if all(t.is_contiguous() for t in tensors):
        return [t.reshape(1, -1) for t in tensors]
    return [t.reshape(-1, t.shape[-1]) for t in tensors]


def blocks(rows: int, columns: int, elements: Optional[int]) -> tuple[tuple[int], int, int]:
    """The grid, and rows and columns of a block: wide first, several rows where a row is short."""
    elements = elements or ELEMENTS
    block_columns = min(triton.next_power_of_2(columns), elements)
    block_rows = min(triton.next_power_of_2(rows), elements // block_columns)
    return (triton.cdiv(rows, block_rows) * triton.cdiv(columns, block_columns),), block_rows, block_columns


def forward(gate: Tensor, up: Tensor, *, elements: Optional[int] = None, warps: Optional[int] = None) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, up = rows_and_columns(gate, up)
    grid, block_rows, block_columns = blocks(gate.shape[0], gate.shape[1], elements)
    silu_and_mul_kernel[grid](
        gate,
        up,
        y,
        *gate.shape,
        *gate.stride(),
        *up.stride(),
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        num_warps=warps or NUM_WARPS,
    )
    return y
