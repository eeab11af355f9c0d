"""add_rms_norm, forward, in NKI: 128 rows at a time, one row per partition; the sum is made in SBUF and normalised there."""

import nki
import nki.isa as nisa
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run
from kdk_kernels.rms_norm.nki import CHUNK, ROWS, SBUF, load_rows, load_scale, normalise


def add_rows(x, residual, new_residual, start):
    """x + residual (N, H), rounded: up to 128 rows from row `start` on, which are stored in new_residual, too."""
    tile = load_rows(x, start)
    rows, H = tile.shape
    for first in range(0, H, CHUNK):
        last = min(first + CHUNK, H)
        other = nl.ndarray((rows, last - first), dtype=tile.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=other, src=residual[start : start + rows, first:last])
        part = tile[:, first:last]
        # GpSimd adds, in float32, and rounds: the other engines have the norm to do.
        nisa.tensor_tensor(dst=part, data1=part, data2=other, op=nl.add, engine=nisa.engine.gpsimd)
    nisa.dma_copy(dst=new_residual[start : start + rows], src=tile)
    return tile


@nki.jit
def add_rms_norm_kernel(x, residual, weight, eps, offset):
    """x, residual (N, H), weight (1, H) -> y, new_residual (N, H), rstd (N, 1)."""
    N, H = x.shape
    y = nl.ndarray((N, H), dtype=x.dtype, buffer=nl.shared_hbm)
    new_residual = nl.ndarray((N, H), dtype=x.dtype, buffer=nl.shared_hbm)
    rstd = nl.ndarray((N, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    scale = load_scale(weight, offset)
    ahead = add_rows(x, residual, new_residual, 0)
    for start in range(0, N, ROWS):
        tile = ahead
        if start + ROWS < N:
            ahead = add_rows(x, residual, new_residual, start + ROWS)
        normalise(tile, scale, eps, y, rstd, start)
    return y, new_residual, rstd


def forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    H = x.shape[-1]
    flat = x.reshape(-1, H), residual.reshape(-1, H), weight.reshape(1, H)
    y, new_residual, rstd = run(add_rms_norm_kernel, *flat, eps, offset)
    return y.reshape(x.shape), new_residual.reshape(x.shape), rstd.reshape(x.shape[:-1])


def supports(target: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> str | None:
    """Two tiles of whole rows and the weight stand in SBUF, beside two chunks each of the residual, squares and results."""
    columns = (SBUF.get(target, SBUF["trn2"]) - 6 * CHUNK * 4) // (2 * x.itemsize + weight.itemsize + 4 * (offset != 0))
    return f"H = {x.shape[-1]}: whole rows fit SBUF up to H = {columns}" if x.shape[-1] > columns else None
