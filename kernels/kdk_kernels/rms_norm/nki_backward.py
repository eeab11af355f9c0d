"""rms_norm, backward, in NKI: 128 rows at a time. dweight is added up per partition in SBUF and over the partitions, once
at the end, by a product with ones on TensorE.

`more` and the copies of dx serve a residual sum before the norm (add_rms_norm), where two gradients meet.
"""

from typing import Optional

import nki
import nki.isa as nisa
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run
from kdk_kernels.rms_norm.nki import CHUNK, ROWS, SBUF

BANK = 512  # float32 columns of a PSUM bank: what one product may write


@nki.jit
def rms_norm_backward_kernel(grad, x, weight, rstd, offset, copies, need_weight, has_more=False, more=None):
    """grad, x, more (N, H), weight (1, H), rstd (N, 1) -> dx (N, H), `copies` times, and dweight (1, H) where needed.

    more: added to dx before it is rounded, if has_more.
    """
    N, H = x.shape
    chunks = (H + CHUNK - 1) // CHUNK
    results = []
    for _ in range(copies):
        results.append(nl.ndarray((N, H), dtype=x.dtype, buffer=nl.shared_hbm))
    if copies > 0:
        raw = nl.ndarray((ROWS, H), dtype=weight.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=raw, src=weight.ap([[0, ROWS], [1, H]]))
        scale = nl.ndarray((ROWS, H), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=scale, data=raw, op0=nl.add, operand0=offset)
    if need_weight:
        dweight = nl.ndarray((1, H), dtype=weight.dtype, buffer=nl.shared_hbm)
        results.append(dweight)
        share = nl.ndarray((ROWS, H), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=share, value=0.0)
    for start in range(0, N, ROWS):
        rows = min(ROWS, N - start)
        g = nl.ndarray((rows, H), dtype=grad.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=g, src=grad[start : start + rows])
        values = nl.ndarray((rows, H), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=values, src=x[start : start + rows])
        root = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=root, src=rstd[start : start + rows])
        totals = nl.ndarray((rows, chunks), dtype=nl.float32, buffer=nl.sbuf)
        for i in range(chunks):
            first, last = i * CHUNK, min((i + 1) * CHUNK, H)
            gn = nl.ndarray((rows, last - first), dtype=nl.float32, buffer=nl.sbuf)  # grad * x * rstd
            nisa.scalar_tensor_tensor(
                dst=gn, data=values[:, first:last], op0=nl.multiply, operand0=root, op1=nl.multiply, operand1=g[:, first:last]
            )
            if need_weight:
                own = share[0:rows, first:last]
                nisa.tensor_tensor(dst=own, data1=own, data2=gn, op=nl.add)
            if copies > 0:
                weighted = nl.ndarray((rows, last - first), dtype=nl.float32, buffer=nl.sbuf)
                nisa.tensor_tensor(dst=weighted, data1=gn, data2=scale[0:rows, first:last], op=nl.multiply)
                nisa.tensor_reduce(dst=totals[:, i : i + 1], op=nl.add, data=weighted, axis=1)
        if copies > 0:
            total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_reduce(dst=total, op=nl.add, data=totals, axis=1)
            # dx = rstd * grad * (weight + offset) - x * rstd^2 * mean: the factor of x, negated
            slope = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=slope, data=total, op0=nl.multiply, operand0=-1.0 / H, op1=nl.multiply, operand1=root)
            nisa.tensor_tensor(dst=slope, data1=slope, data2=root, op=nl.multiply)
            for i in range(chunks):
                first, last = i * CHUNK, min((i + 1) * CHUNK, H)
                direct = nl.ndarray((rows, last - first), dtype=nl.float32, buffer=nl.sbuf)
                nisa.scalar_tensor_tensor(
                    dst=direct, data=g[:, first:last],
                    op0=nl.multiply, operand0=root, op1=nl.multiply, operand1=scale[0:rows, first:last],
                )  # fmt: skip
                if has_more:
                    extra = nl.ndarray((rows, last - first), dtype=more.dtype, buffer=nl.sbuf)
                    nisa.dma_copy(dst=extra, src=more[start : start + rows, first:last])
                    # GpSimd: VectorE has four passes over the chunk already.
                    nisa.tensor_tensor(dst=direct, data1=direct, data2=extra, op=nl.add, engine=nisa.engine.gpsimd)
                out = nl.ndarray((rows, last - first), dtype=x.dtype, buffer=nl.sbuf)
                nisa.scalar_tensor_tensor(
                    dst=out, data=values[:, first:last], op0=nl.multiply, operand0=slope, op1=nl.add, operand1=direct
                )
                for copy in range(copies):
                    nisa.dma_copy(dst=results[copy][start : start + rows, first:last], src=out)
    if need_weight:
        ones = nl.ndarray((ROWS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=ones, value=1.0)
        for first in range(0, H, BANK):
            last = min(first + BANK, H)
            total = nl.ndarray((1, last - first), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(dst=total, stationary=ones, moving=share[:, first:last], accumulate=False)
            out = nl.ndarray((1, last - first), dtype=weight.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=out, src=total)
            nisa.dma_copy(dst=dweight[:, first:last], src=out)
    return tuple(results)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, needs: str
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    needed, H = needs.split(","), x.shape[-1]
    flat = grad.reshape(-1, H), x.reshape(-1, H), weight.reshape(1, H), rstd.reshape(-1, 1)
    results = list(run(rms_norm_backward_kernel, *flat, offset, int("x" in needed), "weight" in needed))
    dx = results.pop(0).reshape(x.shape) if "x" in needed else None
    return dx, results.pop(0).reshape(H) if "weight" in needed else None


def supports(
    target: str, grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, needs: str
) -> str | None:
    """Tiles of whole rows of grad and x, the weight and the shares of dweight stand in SBUF, beside chunks of results."""
    column = grad.itemsize + x.itemsize + weight.itemsize + 4 + 4
    columns = (SBUF.get(target, SBUF["trn2"]) - 8 * CHUNK * 4) // column
    return f"H = {x.shape[-1]}: whole rows fit SBUF up to H = {columns}" if x.shape[-1] > columns else None
