"""rms_norm_dynamic_quant in NKI: 128 rows at a time, one per partition; a row stands in SBUF in float32 until its scale is known."""

import nki
import nki.isa as nisa
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run
from kdk_kernels.rms_norm.nki import CHUNK, ROWS, SBUF, inverse_rms, load_rows, load_scale
from kdk_kernels.rms_norm_dynamic_quant.reference import SMALLEST, largest_of

NEAREST = 12582912.0  # 1.5 * 2^23: float32 numbers of this size are integers, so adding it rounds, ties to even


def row_values(tile, weight, root):
    """tile * root * weight in float32, and the largest absolute value of every row."""
    rows, H = tile.shape
    chunks = (H + CHUNK - 1) // CHUNK
    y = nl.ndarray((rows, H), dtype=nl.float32, buffer=nl.sbuf)
    peaks = nl.ndarray((rows, chunks), dtype=nl.float32, buffer=nl.sbuf)
    for i in range(chunks):
        first, last = i * CHUNK, min((i + 1) * CHUNK, H)
        part = y[:, first:last]
        normal = nl.ndarray(part.shape, dtype=nl.float32, buffer=nl.psum)
        nisa.activation(dst=normal, op=nl.copy, data=tile[:, first:last], scale=root)
        nisa.tensor_tensor(dst=part, data1=normal, data2=weight[0:rows, first:last], op=nl.multiply)
        sizes = nl.ndarray(part.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar_reduce(
            dst=sizes, data=part, op0=nl.abs, operand0=None, reduce_op=nl.maximum, reduce_res=peaks[:, i : i + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )  # fmt: skip
    peak = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=peak, op=nl.maximum, data=peaks, axis=1)
    return y, peak


def quantise_rows(y, peak, q, scale, start, largest):
    """Rows of float32 values into q (N, H) and scale (N, 1), from row `start` on."""
    rows, H = y.shape
    size = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=size, data=peak, op0=nl.maximum, operand0=SMALLEST, op1=nl.multiply, operand1=1.0 / largest)
    inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=size)
    nisa.dma_copy(dst=scale[start : start + rows], src=size)
    for first in range(0, H, CHUNK):
        last = min(first + CHUNK, H)
        part = y[:, first:last]
        out = nl.ndarray(part.shape, dtype=q.dtype, buffer=nl.sbuf)
        if q.dtype == nl.int8:
            nisa.tensor_scalar(dst=part, data=part, op0=nl.multiply, operand0=inverse, op1=nl.add, operand1=NEAREST)
            nisa.tensor_scalar(dst=out, data=part, op0=nl.subtract, operand0=NEAREST)
        else:
            nisa.tensor_scalar(dst=part, data=part, op0=nl.multiply, operand0=inverse, op1=nl.minimum, operand1=largest)
            nisa.tensor_scalar(dst=out, data=part, op0=nl.maximum, operand0=-largest)
        nisa.dma_copy(dst=q[start : start + rows, first:last], src=out)


@nki.jit
def rms_norm_dynamic_quant_kernel(x, weight, eps, offset, dtype, largest):
    """x (N, H), weight (1, H) -> q (N, H), scale (N, 1)."""
    N, H = x.shape
    q = nl.ndarray((N, H), dtype=dtype, buffer=nl.shared_hbm)
    scale = nl.ndarray((N, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    factor = load_scale(weight, offset)
    ahead = load_rows(x, 0)
    for start in range(0, N, ROWS):
        tile = ahead
        if start + ROWS < N:
            ahead = load_rows(x, start + ROWS)
        y, peak = row_values(tile, factor, inverse_rms(tile, eps))
        quantise_rows(y, peak, q, scale, start, largest)
    return q, scale


def forward(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: str) -> tuple[Tensor, Tensor]:
    H = x.shape[-1]
    q, scale = run(rms_norm_dynamic_quant_kernel, x.reshape(-1, H), weight.reshape(1, H), eps, offset, dtype, largest_of(dtype))
    return q.reshape(x.shape), scale.reshape(x.shape[:-1])


def supports(target: str, x: Tensor, weight: Tensor, eps: float, offset: float, dtype: str) -> str | None:
    """Two tiles of rows and of their float32 values and the weight stand in SBUF, beside chunks of squares, sizes and results."""
    per_column = 2 * x.itemsize + 8 + weight.itemsize + 4 * (offset != 0)
    return refused_format(target, dtype) or refused_width(target, x.shape[-1], per_column)


def refused_format(target: str, dtype: str) -> str | None:
    """Why a chip lacks a format, or None."""
    if dtype == "float8_e4m3fn" and target != "trn3":
        return f"{target or 'trn2'} has no float8_e4m3fn (its own float8_e4m3 ends at 240); float8_e5m2 and int8 work"
    return None


def refused_width(target: str, H: int, per_column: int) -> str | None:
    """Why rows of H columns do not fit SBUF, or None."""
    columns = (SBUF.get(target, SBUF["trn2"]) - 6 * CHUNK * 4) // per_column
    return f"H = {H}: whole rows fit SBUF up to H = {columns}" if columns < H else None
