"""add_rms_norm_dynamic_quant in NKI: 128 rows at a time, one per partition; the sum is made, normalised and quantised in SBUF."""

import nki
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run
from kdk_kernels.add_rms_norm.nki import add_rows
from kdk_kernels.rms_norm.nki import ROWS, inverse_rms, load_scale
from kdk_kernels.rms_norm_dynamic_quant.nki import quantise_rows, refused_format, refused_width, row_values
from kdk_kernels.rms_norm_dynamic_quant.reference import largest_of


@nki.jit
def add_rms_norm_dynamic_quant_kernel(x, residual, weight, eps, offset, dtype, largest):
    """x, residual (N, H), weight (1, H) -> q (N, H), scale (N, 1), new_residual (N, H)."""
    N, H = x.shape
    q = nl.ndarray((N, H), dtype=dtype, buffer=nl.shared_hbm)
    scale = nl.ndarray((N, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    new_residual = nl.ndarray((N, H), dtype=x.dtype, buffer=nl.shared_hbm)
    factor = load_scale(weight, offset)
    ahead = add_rows(x, residual, new_residual, 0)
    for start in range(0, N, ROWS):
        tile = ahead
        if start + ROWS < N:
            ahead = add_rows(x, residual, new_residual, start + ROWS)
        y, peak = row_values(tile, factor, inverse_rms(tile, eps))
        quantise_rows(y, peak, q, scale, start, largest)
    return q, scale, new_residual


def forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, dtype: str
) -> tuple[Tensor, Tensor, Tensor]:
    H = x.shape[-1]
    flat = x.reshape(-1, H), residual.reshape(-1, H), weight.reshape(1, H)
    q, scale, new_residual = run(add_rms_norm_dynamic_quant_kernel, *flat, eps, offset, dtype, largest_of(dtype))
    return q.reshape(x.shape), scale.reshape(x.shape[:-1]), new_residual.reshape(x.shape)


def supports(target: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, dtype: str) -> str | None:
    """Two tiles of rows and of their float32 values and the weight stand in SBUF, beside chunks of the rest."""
    per_column = 2 * x.itemsize + 8 + weight.itemsize + 4 * (offset != 0)
    return refused_format(target, dtype) or refused_width(target, x.shape[-1], per_column)
