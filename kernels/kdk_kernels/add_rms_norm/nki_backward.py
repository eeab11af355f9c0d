"""add_rms_norm, backward, in NKI: rms_norm's kernel, which adds the gradient of the residual stream to its own."""

from typing import Optional

import nki
import nki.isa as nisa
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run
from kdk_kernels.rms_norm.nki import CHUNK, ROWS, SBUF
from kdk_kernels.rms_norm.nki_backward import rms_norm_backward_kernel


@nki.jit
def copy_kernel(grad, copies):
    """Nothing flowed back to y: the sum passes the gradient of new_residual (N, H) on, `copies` times."""
    N, H = grad.shape
    results = []
    for _ in range(copies):
        results.append(nl.ndarray((N, H), dtype=grad.dtype, buffer=nl.shared_hbm))
    for start in range(0, N, ROWS):
        rows = min(ROWS, N - start)
        for first in range(0, H, CHUNK):
            last = min(first + CHUNK, H)
            tile = nl.ndarray((rows, last - first), dtype=grad.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=tile, src=grad[start : start + rows, first:last])
            for i in range(copies):
                nisa.dma_copy(dst=results[i][start : start + rows, first:last], src=tile)
    return tuple(results)


def backward(
    grad_y: Optional[Tensor],
    grad_new_residual: Optional[Tensor],
    new_residual: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    needs: str,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    needed, shape = needs.split(","), new_residual.shape
    H = shape[-1]
    of_sum = [name for name in ("x", "residual") if name in needed]
    more = None if grad_new_residual is None else grad_new_residual.reshape(-1, H)
    found: list[Tensor] = []
    if grad_y is not None:
        flat = grad_y.reshape(-1, H), new_residual.reshape(-1, H), weight.reshape(1, H), rstd.reshape(-1, 1)
        added = () if more is None else (True, more)
        found = list(run(rms_norm_backward_kernel, *flat, offset, len(of_sum), "weight" in needed, *added))
    elif more is not None and of_sum:
        found = list(run(copy_kernel, more, len(of_sum)))
    results = {name: found.pop(0).reshape(shape) for name in of_sum if found}
    return results.get("x"), results.get("residual"), found[0].reshape(H) if found else None


def supports(
    target: str,
    grad_y: Optional[Tensor],
    grad_new_residual: Optional[Tensor],
    new_residual: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    needs: str,
) -> str | None:
    """Tiles of whole rows of grad_y and the sum, the weight and the shares of dweight stand in SBUF, beside chunks of the rest."""
    H, itemsize = new_residual.shape[-1], new_residual.itemsize
    columns = (SBUF.get(target, SBUF["trn2"]) - 10 * CHUNK * 4) // (2 * itemsize + weight.itemsize + 4 + 4)
    return f"H = {H}: whole rows fit SBUF up to H = {columns}" if new_residual.shape[-1] > columns else None
