"""linear_cross_entropy, backward, in NKI: a call takes some hundred rows and a part of the vocabulary, as in the forward. dx goes
from part to part, dweight and dbias from rows to rows, in float32; the last call rounds them.
"""

from typing import Optional

import nki
import nki.isa as nisa
import nki.language as nl
import torch
from torch import Tensor

from kdk.backends.nki.launch import run
from kdk_kernels.linear_cross_entropy.nki import (
    BESIDE,
    EXACT,
    ROWS,
    SBUF,
    column,
    count_columns,
    first_column,
    load_bias,
    load_labels,
    load_rows,
    load_start,
    logits,
    place_from,
)  # fmt: skip

PART = 2048  # columns of the vocabulary in a call
BANK = 512  # float32 columns of a PSUM bank: what one product may write


def load_column(source, start, rows):
    tile = column(rows)
    nisa.dma_copy(dst=tile, src=source[start : start + rows])
    return tile


def load_row(grad, target, lse, columns, origin, start, rows, ignore_index, z_loss):
    """What the gradient of the logits needs of 128 rows: grad, the labels as counted from the part's first column, lse,
    1 + 2 z_loss lse, and where they are ignored."""
    labels, sums, factor = load_labels(target, start, rows), load_column(lse, start, rows), column(rows)
    nisa.tensor_scalar(dst=factor, data=sums, op0=nl.multiply, operand0=2.0 * z_loss, op1=nl.add, operand1=1.0)
    flag = column(rows)
    nisa.tensor_scalar(dst=flag, data=labels, op0=nl.equal, operand0=float(ignore_index))
    ignored = nl.ndarray((rows, columns.shape[1]), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=ignored, data=columns[0:rows], op0=nl.multiply, operand0=0.0, op1=nl.add, operand1=flag)
    return load_column(grad, start, rows), place_from(labels, origin), sums, factor, ignored


def gradient(z, t, of_row, columns, begin, dtype, V, label_smoothing, softcap, z_loss):
    """The gradient of the logits of a part's columns from `begin` on, as stored."""
    (rows, width), (grad, places, sums, factor, ignored) = z.shape, of_row
    d = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=d, data=z, op0=nl.subtract, operand0=sums, op1=nl.minimum, operand1=0.0)
    nisa.activation(dst=d, op=nl.exp, data=d)
    if z_loss != 0.0:
        nisa.tensor_scalar(dst=d, data=d, op0=nl.multiply, operand0=factor)
    place, hot = column(rows), nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=place, data=places, op0=nl.subtract, operand0=float(begin))
    nisa.tensor_scalar(
        dst=hot, data=columns[0:rows, 0:width], op0=nl.equal, operand0=place, op1=nl.multiply, operand1=label_smoothing - 1.0
    )
    nisa.tensor_tensor(dst=d, data1=d, data2=hot, op=nl.add)
    if label_smoothing != 0.0:
        nisa.tensor_scalar(dst=d, data=d, op0=nl.subtract, operand0=label_smoothing / V)
    if softcap != 0.0:
        slope = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=slope, data1=t, data2=t, op=nl.multiply)
        nisa.tensor_scalar(dst=slope, data=slope, op0=nl.multiply, operand0=-1.0, op1=nl.add, operand1=1.0)
        nisa.tensor_tensor(dst=d, data1=d, data2=slope, op=nl.multiply)
    stored = nl.ndarray((rows, width), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=stored, data=d, op0=nl.multiply, operand0=grad)
    nisa.tensor_copy_predicated(dst=stored, src=0.0, predicate=ignored[:, 0:width])
    return stored


def add_to_dx(total, d, weight):
    """total (rows, H) += d (rows, width) @ weight, blocks of 128 rows."""
    rows, H = total.shape
    turned = []
    for k in range(len(weight)):
        depth = weight[k].shape[0]
        other = nl.ndarray((depth, rows), dtype=d.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=other, data=d[:, k * ROWS : k * ROWS + depth])
        tile = nl.ndarray((depth, rows), dtype=d.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=tile, src=other)
        turned.append(tile)
    for first in range(0, H, BANK):
        last = min(first + BANK, H)
        share = nl.ndarray((rows, last - first), dtype=nl.float32, buffer=nl.psum)
        for k in range(len(turned)):
            nisa.nc_matmul(dst=share, stationary=turned[k], moving=weight[k][:, first:last], accumulate=k > 0)
        nisa.tensor_tensor(dst=total[:, first:last], data1=share, data2=total[:, first:last], op=nl.add)


def sum_over_rows(gradients, others, begin, width, out, at, started, before):
    """out (P, K) from row `at` on: the sum over blocks of rows of gradients^T @ others, plus `before`.

    gradients: blocks (rows, columns), of which `width` from `begin` on; others: blocks (rows, K).
    """
    K = others[0].shape[1]
    for first in range(0, K, BANK):
        last = min(first + BANK, K)
        share = nl.ndarray((width, last - first), dtype=nl.float32, buffer=nl.psum)
        for i in range(len(gradients)):
            nisa.nc_matmul(dst=share, stationary=gradients[i][:, begin : begin + width], moving=others[i][:, first:last], accumulate=i > 0)
        result = nl.ndarray((width, last - first), dtype=out.dtype, buffer=nl.sbuf)
        if started:
            sofar = nl.ndarray((width, last - first), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=sofar, src=before[at : at + width, first:last])
            nisa.tensor_tensor(dst=result, data1=share, data2=sofar, op=nl.add)
        else:
            nisa.tensor_copy(dst=result, src=share)
        nisa.dma_copy(dst=out[at : at + width, first:last], src=result)


@nki.jit
def gradient_kernel(
    grad, x, weight, target, lse, has_bias, bias, start, tile, V, ignore_index, label_smoothing, softcap, z_loss,
    need_x, x_started, x_before, x_last, need_weight, need_bias, rows_started, weight_before, bias_before, rows_last,
):  # fmt: skip
    """x (N, H), grad, target, lse (N, 1), a part of the vocabulary from column start (1, 1) on: weight (P, H), bias (1, P).

    Returns what is needed of dx (N, H), dweight (P, H), dbias (P, 1): sums so far in float32, the last ones rounded.
    """
    N, H, P, blocks = x.shape[0], x.shape[1], weight.shape[0], range(0, x.shape[0], ROWS)
    results = []
    if need_x:
        dx = nl.ndarray((N, H), dtype=x.dtype if x_last else nl.float32, buffer=nl.shared_hbm)
        results.append(dx)
    if need_weight:
        dweight = nl.ndarray((P, H), dtype=x.dtype if rows_last else nl.float32, buffer=nl.shared_hbm)
        results.append(dweight)
    if need_bias:
        dbias = nl.ndarray((P, 1), dtype=x.dtype if rows_last else nl.float32, buffer=nl.shared_hbm)
        results.append(dbias)
    raw, left = load_rows(x, 0, N, True)
    columns, origin = count_columns(tile), load_start(start)
    of_rows, totals, ones = [], [], []
    for first in blocks:
        rows = min(ROWS, N - first)
        of_rows.append(load_row(grad, target, lse, columns, origin, first, rows, ignore_index, z_loss))
        one = nl.ndarray((rows, 1), dtype=x.dtype, buffer=nl.sbuf)
        nisa.memset(dst=one, value=1.0)
        ones.append(one)
        if need_x:
            total = nl.ndarray((rows, H), dtype=nl.float32, buffer=nl.sbuf)
            if x_started:
                nisa.dma_copy(dst=total, src=x_before[first : first + rows])
            else:
                nisa.memset(dst=total, value=0.0)
            totals.append(total)
    for begin in range(0, P, tile):
        width = min(tile, P - begin)
        w, right = load_rows(weight, begin, width, True)
        shift = columns
        if has_bias:
            shift = load_bias(bias, begin, width)
        gradients = []
        for i in range(len(of_rows)):
            z, t = logits(left, right, i * ROWS, raw[i].shape[0], has_bias, shift, softcap)
            d = gradient(z, t, of_rows[i], columns, begin, x.dtype, V, label_smoothing, softcap, z_loss)
            gradients.append(d)
            if need_x:
                add_to_dx(totals[i], d, w)
        for first in range(0, width, ROWS):
            count = min(ROWS, width - first)
            if need_weight:
                sum_over_rows(gradients, raw, first, count, dweight, begin + first, rows_started, weight_before)
            if need_bias:
                sum_over_rows(gradients, ones, first, count, dbias, begin + first, rows_started, bias_before)
    for i in range(len(totals)):
        rows = totals[i].shape[0]
        out = nl.ndarray((rows, H), dtype=dx.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=out, src=totals[i])
        nisa.dma_copy(dst=dx[i * ROWS : i * ROWS + rows], src=out)
    return tuple(results)


def tile_size(target: str, H: int, itemsize: int) -> int:
    """Rows, and columns of the vocabulary, of which SBUF holds the blocks as they came, turned, and dx; 0: it holds none."""
    room = SBUF.get(target, SBUF["trn2"]) - BESIDE
    return next((size for size in (512, 256, 128) if H * (size // ROWS * (4 * itemsize + 4) + itemsize) <= room), 0)


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor],
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: Optional[float],
    z_loss: float,
    needs: str,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    (V, H), needed = weight.shape, needs.split(",")
    flat, narrow = x.reshape(-1, H), [t.reshape(-1, 1) for t in (grad, target, lse)]
    shift = None if bias is None else bias.reshape(1, V)
    N, size = flat.shape[0], tile_size("trn2", H, x.itemsize)
    need = ["x" in needed, "weight" in needed, "bias" in needed]
    dx: list[Optional[Tensor]] = [None] * len(range(0, N, size))
    dweight, dbias = [], []
    for start in range(0, V, PART):
        end = min(start + PART, V)
        sums: dict[str, Tensor] = {}
        for i, first in enumerate(range(0, N, size)):
            rows = slice(first, min(first + size, N))
            g, labels, total = (t[rows] for t in narrow)
            part = None if shift is None else shift[:, start:end]
            results = list(run(
                gradient_kernel, g, flat[rows], weight[start:end], labels, total, bias is not None, part, first_column(start, x), size,
                V, ignore_index, label_smoothing, softcap or 0.0, z_loss, need[0], start > 0, dx[i], end == V,
                need[1], need[2], first > 0, sums.get("weight"), sums.get("bias"), rows.stop == N,
            ))  # fmt: skip
            if need[0]:
                dx[i] = results.pop(0)
            sums = dict(zip([name for name in ("weight", "bias") if name in needed], results))
        dweight += [sums["weight"]] if need[1] else []
        dbias += [sums["bias"]] if need[2] else []
    found = [t for t in dx if t is not None]
    return (
        torch.cat(found).reshape(x.shape) if need[0] else None,
        torch.cat(dweight) if need[1] else None,
        torch.cat(dbias).reshape(V) if need[2] else None,
    )


def supports(
    target: str, grad: Tensor, x: Tensor, weight: Tensor, labels: Tensor, bias: Optional[Tensor], lse: Tensor,
    ignore_index: int, label_smoothing: float, softcap: Optional[float], z_loss: float, needs: str,
) -> str | None:  # fmt: skip
    """Blocks of whole rows, turned too, and dx stand in SBUF, in either generation's."""
    V, H = weight.shape
    if V > EXACT:
        return f"V = {V}: columns are counted in float32, exact up to V = {EXACT}"
    widest = (SBUF["trn2"] - BESIDE) // (5 * x.itemsize + 4)
    return f"H = {H}: blocks of {ROWS} rows fit SBUF up to H = {widest}" if widest < H else None
