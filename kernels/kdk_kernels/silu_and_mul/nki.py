"""SiLU-and-multiply in NKI: tiles of 128 partitions, silu on ScalarE, the product on VectorE."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run

PARTITIONS = 128
CHUNK_BYTES = 8192  # of one input and partition: a DMA saturates from 4 KiB, and three iterations fit into SBUF at once


@nki.jit
def silu_and_mul_kernel(gate, gate_stride, up, up_stride, rows, columns, width):
    """gate, up: lines of elements whose rows start every gate_stride, up_stride elements -> y (rows, columns)."""
    y = nl.ndarray((rows, columns), dtype=gate.dtype, buffer=nl.shared_hbm)
    for row in range(0, rows, PARTITIONS):
        height = min(PARTITIONS, rows - row)
        for column in range(0, columns, width):
            part = min(width, columns - column)
            g = nl.ndarray((height, part), dtype=gate.dtype, buffer=nl.sbuf)
            u = nl.ndarray((height, part), dtype=up.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=g, src=gate.ap([[gate_stride, height], [1, part]], offset=row * gate_stride + column))
            nisa.dma_copy(dst=u, src=up.ap([[up_stride, height], [1, part]], offset=row * up_stride + column))
            activated = nl.ndarray((height, part), dtype=nl.float32, buffer=nl.sbuf)
            nisa.activation(dst=activated, op=nl.silu, data=g)
            product = nl.ndarray((height, part), dtype=gate.dtype, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=product, data1=activated, data2=u, op=nl.multiply)
            nisa.dma_copy(dst=y[row : row + height, column : column + part], src=product)
    return y


def lines(*tensors: Tensor) -> tuple[int, int, list[tuple[Tensor, int]]]:
    """Rows and columns to compute on, and each tensor as a contiguous line of elements with its row stride.

    The toolchain takes contiguous tensors. A view whose rows have one stride and whose columns lie side by side, such as half of
    a ``chunk(2, -1)``, is passed as the line of memory that it spans, and the kernel steps over what lies between its rows.
    Any other view (transposed, expanded) is copied, as element-wise DMA would cost more than the copy.
    """
    if all(t.is_contiguous() for t in tensors):
        rows, columns = fold(tensors[0].numel(), tensors[0].shape[-1])
        return rows, columns, [(t.reshape(-1), columns) for t in tensors]
    matrices = [t.reshape(-1, t.shape[-1]) for t in tensors]
    matrices = [m if m.stride(1) == 1 and m.stride(0) >= m.shape[1] else m.contiguous() for m in matrices]
    rows, columns = matrices[0].shape
    return rows, columns, [(m.as_strided(((rows - 1) * m.stride(0) + columns,), (1,)), m.stride(0)) for m in matrices]


def fold(elements: int, columns: int) -> tuple[int, int]:
    """Rows and columns for contiguous data: as many partitions at work as the number of elements allows."""
    rows = elements // columns
    folded = next(p for p in range(PARTITIONS, 0, -1) if elements % p == 0)
    return (folded, elements // folded) if folded >= min(rows, PARTITIONS) else (rows, columns)


def tile_width(columns: int, itemsize: int) -> int:
    """Columns of a tile: equal parts, none above CHUNK_BYTES."""
    parts = -(-columns * itemsize // CHUNK_BYTES)
    return -(-columns // parts)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    rows, columns, ((gate_line, gate_stride), (up_line, up_stride)) = lines(gate, up)
    width = tile_width(columns, gate.itemsize)
    y = run(silu_and_mul_kernel, gate_line, gate_stride, up_line, up_stride, rows, columns, width)
    return y.reshape(gate.shape)
