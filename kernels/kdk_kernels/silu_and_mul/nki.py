"""SiLU-and-multiply in NKI: tiles of 128 partitions, silu on ScalarE, the product on VectorE.

ScalarE takes silu from a table whose accuracy, and whose value for an infinite gate, the vendor does not publish.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run

PARTITIONS = 128
CHUNK_BYTES = 8192  # of one input and partition: a DMA saturates from 4 KiB, and three iterations fit into SBUF at once
HALF_PSUM = 2048  # float32 columns


def number_of(layout):
    """Tiles of a matrix of (rows, columns, pieces, width)."""
    rows, columns, _, width = layout
    return (rows + PARTITIONS - 1) // PARTITIONS * ((columns + width - 1) // width)


def box(i, layout):
    """First row and column, height and width of tile i."""
    rows, columns, _, width = layout
    across = (columns + width - 1) // width
    row, column = i // across * PARTITIONS, i % across * width
    return row, column, min(PARTITIONS, rows - row), min(width, columns - column)


def load(line, stride, i, layout):
    """Fetch tile i of a tensor that `lines` has prepared into SBUF."""
    _, columns, pieces, _ = layout
    row, column, height, part = box(i, layout)
    tile = nl.ndarray((height, part), dtype=line.dtype, buffer=nl.sbuf)
    if pieces == 1:
        nisa.dma_copy(dst=tile, src=line.ap([[stride, height], [1, part]], offset=row * stride + column))
    else:  # then one tile holds all rows, and row is 0
        for whole in range(height // pieces):
            source = line.ap([[columns, pieces], [1, part]], offset=whole * stride + column)
            nisa.dma_copy(dst=tile[whole * pieces : (whole + 1) * pieces], src=source)
    return tile


def times_activation(gate, op, factor, dst):
    """dst = op(gate) * factor, with op(gate) in float32.

    op(gate) stands in PSUM: a product of two tiles in SBUF takes VectorE two cycles per element, with one of them in PSUM one.
    """
    height, part = gate.shape
    product = nl.ndarray(gate.shape, dtype=dst.dtype, buffer=nl.sbuf)
    for first in range(0, part, HALF_PSUM):
        last = min(first + HALF_PSUM, part)
        activated = nl.ndarray((height, last - first), dtype=nl.float32, buffer=nl.psum)
        nisa.activation(dst=activated, op=op, data=gate[:, first:last])
        nisa.tensor_tensor(dst=product[:, first:last], data1=activated, data2=factor[:, first:last], op=nl.multiply)
    nisa.dma_copy(dst=dst, src=product)


@nki.jit
def silu_and_mul_kernel(gate, gate_stride, up, up_stride, rows, columns, pieces, width):
    """gate and up as `lines` prepares them -> y (rows, columns), in tiles of `width` columns.

    DMA goes in program order: the next tile is asked for before this one's result is stored.
    """
    y = nl.ndarray((rows, columns), dtype=gate.dtype, buffer=nl.shared_hbm)
    layout = (rows, columns, pieces, width)
    tiles = number_of(layout)
    next_g, next_u = load(gate, gate_stride, 0, layout), load(up, up_stride, 0, layout)
    for i in range(tiles):
        g, u = next_g, next_u
        if i + 1 < tiles:
            next_g, next_u = load(gate, gate_stride, i + 1, layout), load(up, up_stride, i + 1, layout)
        row, column, height, part = box(i, layout)
        times_activation(g, nl.silu, u, y[row : row + height, column : column + part])
    return y


def lines(*tensors: Tensor) -> tuple[list[tuple[Tensor, int]], tuple[int, int, int, int]]:
    """Each tensor as a contiguous line of elements with its row stride; and rows, columns, pieces, width of a tile.

    The toolchain takes contiguous tensors. A view whose rows have one stride and whose columns lie side by side, such
    as half of a `chunk(2, -1)`, is passed as the line of memory that it spans, and the kernel steps over what lies
    between its rows. Any other view (transposed, expanded) is copied: DMA of single elements would cost more.

    Few rows are folded into more and shorter ones, for more partitions to work: contiguous data anyhow, rows with gaps
    between them into `pieces` equal parts each.
    """
    columns = tensors[0].shape[-1]
    matrices = [t.reshape(-1, columns) for t in tensors]
    matrices = [m if m.stride(1) == 1 and m.stride(0) >= columns else m.contiguous() for m in matrices]
    rows, pieces = len(matrices[0]), 1
    if all(m.is_contiguous() for m in matrices):
        folded = _largest_divisor(rows * columns, PARTITIONS)
        if folded >= min(rows, PARTITIONS):
            matrices = [m.reshape(folded, -1) for m in matrices]
            rows, columns = matrices[0].shape
    elif rows < PARTITIONS:
        pieces = _largest_divisor(columns, PARTITIONS // rows)
        columns //= pieces
        rows *= pieces
    spans = [(m.as_strided(((len(m) - 1) * m.stride(0) + m.shape[1],), (1,)), m.stride(0)) for m in matrices]
    chunks = -(-columns * tensors[0].itemsize // CHUNK_BYTES)
    return spans, (rows, columns, pieces, -(-columns // chunks))


def _largest_divisor(number: int, limit: int) -> int:
    return next(d for d in range(limit, 0, -1) if number % d == 0)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    spans, layout = lines(gate, up)
    (y,) = run(silu_and_mul_kernel, *spans[0], *spans[1], *layout)
    return y.reshape(gate.shape)
