"""rms_norm, forward, in NKI: 128 rows at a time, one row per partition.

ScalarE makes the statistic and the rows times their 1 / rms, VectorE the product with the weight. What goes from one to
the other lies in PSUM: a product of two tiles in SBUF takes VectorE two cycles per element, with one of them in PSUM one.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run

ROWS = 128
CHUNK = 2048  # columns whose squares, or results, stand in SBUF at once; in float32 half of PSUM
SBUF = {"trn2": 208 << 10, "trn3": 240 << 10}  # usable bytes per partition


def load_scale(weight, offset):
    """weight (1, H) + offset, the same in every partition."""
    H = weight.shape[1]
    scale = nl.ndarray((ROWS, H), dtype=weight.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=scale, src=weight.ap([[0, ROWS], [1, H]]))
    if offset == 0.0:
        return scale
    shifted = nl.ndarray((ROWS, H), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=shifted, data=scale, op0=nl.add, operand0=offset)
    return shifted


def load_rows(x, start):
    """Up to 128 rows of x (N, H), from row `start` on.

    DMA goes in program order: the next tile is asked for before the results of this one are stored, so that it arrives
    while this one is computed.
    """
    N, H = x.shape
    rows = min(ROWS, N - start)
    tile = nl.ndarray((rows, H), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x[start : start + rows])
    return tile


def inverse_rms(tile, eps):
    """1 / sqrt(mean(x^2) + eps) of a tile's rows, (rows, 1)."""
    rows, H = tile.shape
    chunks = (H + CHUNK - 1) // CHUNK
    totals = nl.ndarray((rows, chunks), dtype=nl.float32, buffer=nl.sbuf)
    for i in range(chunks):
        part = tile[:, i * CHUNK : min((i + 1) * CHUNK, H)]
        squares = nl.ndarray(part.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(
            dst=squares, op=nl.square, data=part,
            reduce_op=nl.add, reduce_res=totals[:, i : i + 1], reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )  # fmt: skip
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=totals, axis=1)
    mean = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=mean, data=total, op0=nl.multiply, operand0=1.0 / H, op1=nl.add, operand1=eps)
    root = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    # GpSimd's rsqrt is exact everywhere; ScalarE's table ends at 2^-87 and 2^97.
    nisa.tensor_scalar(dst=root, data=mean, op0=nl.rsqrt, operand0=None, engine=nisa.engine.gpsimd)
    return root


def normalise(tile, scale, eps, y, rstd, start):
    """A tile of rows, from row `start` on: into y (N, H) and rstd (N, 1)."""
    rows, H = tile.shape
    root = inverse_rms(tile, eps)
    for first in range(0, H, CHUNK):
        last = min(first + CHUNK, H)
        normal = nl.ndarray((rows, last - first), dtype=nl.float32, buffer=nl.psum)
        nisa.activation(dst=normal, op=nl.copy, data=tile[:, first:last], scale=root)
        out = nl.ndarray((rows, last - first), dtype=y.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=out, data1=normal, data2=scale[0:rows, first:last], op=nl.multiply)
        nisa.dma_copy(dst=y[start : start + rows, first:last], src=out)
    nisa.dma_copy(dst=rstd[start : start + rows], src=root)


@nki.jit
def rms_norm_kernel(x, weight, eps, offset):
    """x (N, H), weight (1, H) -> y (N, H), rstd (N, 1)."""
    N, H = x.shape
    y = nl.ndarray((N, H), dtype=x.dtype, buffer=nl.shared_hbm)
    rstd = nl.ndarray((N, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    scale = load_scale(weight, offset)
    ahead = load_rows(x, 0)
    for start in range(0, N, ROWS):
        tile = ahead
        if start + ROWS < N:
            ahead = load_rows(x, start + ROWS)
        normalise(tile, scale, eps, y, rstd, start)
    return y, rstd


def forward(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    H = x.shape[-1]
    y, rstd = run(rms_norm_kernel, x.reshape(-1, H), weight.reshape(1, H), eps, offset)
    return y.reshape(x.shape), rstd.reshape(x.shape[:-1])


def supports(target: str, x: Tensor, weight: Tensor, eps: float, offset: float) -> str | None:
    """Two tiles of whole rows and the weight stand in SBUF, beside two chunks of squares and results."""
    columns = (SBUF.get(target, SBUF["trn2"]) - 4 * CHUNK * 4) // (2 * x.itemsize + weight.itemsize + 4 * (offset != 0))
    return f"H = {x.shape[-1]}: whole rows fit SBUF up to H = {columns}" if x.shape[-1] > columns else None
