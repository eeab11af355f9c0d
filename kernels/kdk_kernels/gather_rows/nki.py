"""gather_rows in NKI: 128 rows at a time, one per partition, by a DMA whose addresses are the index."""

import nki
import nki.isa as nisa
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run

ROWS = 128
CHUNK = 8192  # columns of a tile


@nki.jit
def gather_rows_kernel(table, index):
    """table (R, H), index (N, 1) int32 -> rows (N, H)."""
    H, N = table.shape[1], index.shape[0]
    out = nl.ndarray((N, H), dtype=table.dtype, buffer=nl.shared_hbm)
    for start in range(0, N, ROWS):
        rows = min(ROWS, N - start)
        numbers = nl.ndarray((rows, 1), dtype=index.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=numbers, src=index[start : start + rows])
        for first in range(0, H, CHUNK):
            width = min(CHUNK, H - first)
            tile = nl.ndarray((rows, width), dtype=table.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=tile, src=table.ap([[H, rows], [1, width]], offset=first, vector_offset=numbers))
            nisa.dma_copy(dst=out[start : start + rows, first : first + width], src=tile)
    return out


def forward(table: Tensor, index: Tensor) -> Tensor:
    (out,) = run(gather_rows_kernel, table, index.reshape(-1, 1))
    return out.reshape(*index.shape, table.shape[1])
