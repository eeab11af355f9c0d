"""group_norm_silu, backward, in NKI: rows and tiles as in the forward; the derivative of silu comes from ScalarE.

The sums of a row are an image's shares of dweight and dbias. Weighted, those of a group go through HBM, as in the forward, and come
back as the two means that dx needs. GpSimd takes dz * n: VectorE has more passes than the data takes to arrive.
"""

from typing import Optional

import nki
import nki.isa as nisa
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run
from kdk.layouts import format_of
from kdk_kernels.group_norm_silu.nki import ROWS, column, fetch, normalised, per_row, spread_over, too_many_pixels

TILE = 2048  # pixels that are fetched at once


def product(left, right, engine=nisa.engine.vector):
    out = nl.ndarray(left.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=out, data1=left, data2=right, op=nl.multiply, engine=engine)
    return out


def gradients(tensors, columns, start, rows, first, last):
    """Of a tile the normalised x, and the gradient of what silu was taken of."""
    grad, x = tensors
    w, b, centre, scale = columns
    n = normalised(fetch(x, start, rows, first, last), centre, scale)
    slope = nl.ndarray(n.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=slope, op=nl.silu_dx, data=n, bias=b, scale=w)
    return n, product(slope, fetch(grad, start, rows, first, last))


def row_sums(tensors, columns, start, rows):
    """Over the pixels of each row the sums of dz * n and of dz, (rows, 1) each."""
    P = tensors[0].shape[1]
    tiles = (P + TILE - 1) // TILE
    parts = nl.ndarray((rows, 2, tiles), dtype=nl.float32, buffer=nl.sbuf)
    for i in range(tiles):
        n, dz = gradients(tensors, columns, start, rows, i * TILE, min((i + 1) * TILE, P))
        nisa.tensor_reduce(dst=parts[:, 0, i : i + 1], op=nl.add, data=product(dz, n, nisa.engine.gpsimd), axis=1)
        nisa.tensor_reduce(dst=parts[:, 1, i : i + 1], op=nl.add, data=dz, axis=1)
    sums = []
    for i in range(2):
        total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=total, op=nl.add, data=parts[:, i], axis=1)
        sums.append(total)
    return sums


def group_means(weighted, size):
    """weighted (groups, in_group), of every row its weighted sum, becomes of every row the mean over its group."""
    groups, in_group = weighted.shape
    for start in range(0, groups, ROWS):
        rows = min(ROWS, groups - start)
        mean = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=mean, op=nl.add, data=fetch(weighted, start, rows, 0, in_group), axis=1)
        nisa.tensor_scalar(dst=mean, data=mean, op0=nl.multiply, operand0=1.0 / size)
        nisa.dma_copy(dst=weighted[start : start + rows], src=spread_over(mean, in_group))


def row_gradients(tensors, columns, means, start, rows, dx):
    """dx = (dz * weight - mean(g) - n * mean(g * n)) * rstd of a tile of rows: in this order a difference of equal numbers is 0."""
    P = dx.shape[1]
    w, scale = columns[0], columns[3]
    mean_gn, mean_g = means
    nisa.tensor_scalar(dst=mean_gn, data=mean_gn, op0=nl.multiply, operand0=-1.0)
    for first in range(0, P, TILE):
        last = min(first + TILE, P)
        n, dz = gradients(tensors, columns, start, rows, first, last)
        nisa.tensor_scalar(dst=dz, data=dz, op0=nl.multiply, operand0=w, op1=nl.subtract, operand1=mean_g)
        nisa.scalar_tensor_tensor(dst=dz, data=n, op0=nl.multiply, operand0=mean_gn, op1=nl.add, operand1=dz)
        out = nl.ndarray((rows, last - first), dtype=dx.dtype, buffer=nl.sbuf)
        nisa.activation(dst=out, op=nl.copy, data=dz, scale=scale)  # on ScalarE: VectorE has enough to do
        nisa.dma_copy(dst=dx[start : start + rows, first:last], src=out)


@nki.jit
def group_norm_silu_backward_kernel(grad, x, weight, bias, mean, rstd, in_group, need_x):
    """grad, x (R, P), weight, bias, mean, rstd (R, 1) -> the sums of dz * n and dz (R, 1), and dx (R, P) where needed."""
    R, P = x.shape
    groups = R // in_group
    of_weight = nl.ndarray((R, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    of_bias = nl.ndarray((R, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    results = [of_weight, of_bias]
    weighted = []
    for _ in range(2 if need_x else 0):
        weighted.append(nl.ndarray((groups, in_group), dtype=nl.float32, buffer=nl.private_hbm))
    for start in range(0, R, ROWS):
        rows = min(ROWS, R - start)
        columns = [column(t, start, rows) for t in (weight, bias, mean, rstd)]
        sums = row_sums((grad, x), columns, start, rows)
        for i in range(2):
            nisa.dma_copy(dst=results[i][start : start + rows], src=sums[i])
            if need_x:
                nisa.dma_copy(dst=weighted[i].reshape((R, 1))[start : start + rows], src=product(sums[i], columns[0]))
    if need_x:
        dx = nl.ndarray((R, P), dtype=x.dtype, buffer=nl.shared_hbm)
        results.append(dx)
        for t in weighted:
            group_means(t, in_group * P)
        for start in range(0, R, ROWS):
            rows = min(ROWS, R - start)
            columns = [column(t, start, rows) for t in (weight, bias, mean, rstd)]
            means = [column(t.reshape((R, 1)), start, rows) for t in weighted]
            row_gradients((grad, x), columns, means, start, rows, dx)
    return tuple(results)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, needs: str
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    needed, N, C, groups = needs.split(","), x.shape[0], x.shape[1], mean.shape[1]
    in_group, shape = C // groups, (N * C, x.shape[2:].numel())
    statistics = [t.unsqueeze(-1).expand(N, groups, in_group).reshape(-1, 1) for t in (mean, rstd)]
    of_weight, of_bias, *dx = run(
        group_norm_silu_backward_kernel, grad.reshape(shape), x.reshape(shape), per_row(weight, N), per_row(bias, N), *statistics,
        in_group, "x" in needed,
    )  # fmt: skip
    return (
        dx[0].reshape(x.shape).contiguous(memory_format=format_of(grad)) if dx else None,
        of_weight.reshape(N, C).sum(0).to(weight.dtype) if "weight" in needed else None,
        of_bias.reshape(N, C).sum(0).to(bias.dtype) if "bias" in needed else None,
    )


def supports(target: str, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, needs: str) -> str | None:
    return too_many_pixels(x)
