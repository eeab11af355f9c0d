"""linear_cross_entropy, backward, in Triton: for a part of the vocabulary after the other the gradient of the logits, and from it
the part of dweight and what it adds to dx. So the logits are multiplied once more, and a part of their gradient is stored.
"""

import math
from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdk_kernels.linear_cross_entropy.triton import TUNABLE as TUNABLE
from kdk_kernels.linear_cross_entropy.triton import logits, place, tile

PARTS = 32  # of the vocabulary; the gradient of the logits exists for one of them
LEAST = 1 << 22  # elements of a part: smaller problems need no more than one


@triton.jit
def inside(width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the elements of a tile lie behind its first one, in int32: 64 bits for every element would spill registers."""
    return tl.arange(0, ROWS)[:, None] * width + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _gradient(
    grad, x, weight, bias, target, lse, d, shares,
    first, N, width, V, H, grad_step, x_row, x_col, w_row, w_col, bias_step, target_step, lse_step,
    ignore_index, label_smoothing, softcap, z_loss,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, STORE: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """weight, bias and d are the part's, which begins at column `first` and has `width`."""
    i, j = place(tl.cdiv(N, ROWS), tl.cdiv(width, COLUMNS))
    rows = i.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = j.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    z, t = logits(
        x, weight, bias, rows, columns, N, width, H, x_row, x_col, w_row, w_col, bias_step, softcap,
        ROWS, COLUMNS, DEPTH, PRECISION, BIAS, SOFTCAP,
    )  # fmt: skip
    g = tl.load(grad + rows * grad_step, mask=rows < N, other=0.0)
    total = tl.load(lse + rows * lse_step, mask=rows < N, other=0.0)
    label = tl.load(target + rows * target_step, mask=rows < N, other=0)
    away = z - total[:, None]
    p = tl.exp(tl.where(away > 0.0, 0.0, away))
    p = tl.where(z_loss != 0.0, p * (1.0 + 2.0 * z_loss * total[:, None]), p)
    p -= tl.where((first + columns)[None, :] == label[:, None], 1.0 - label_smoothing, 0.0)
    p -= label_smoothing / V
    if SOFTCAP:
        p *= 1.0 - t * t
    kept = ((rows < N) & (label != ignore_index))[:, None] & (columns < width)[None, :]
    rounded = tl.where(kept, p * g[:, None], 0.0).to(d.dtype.element_ty)
    if STORE:
        mask = (rows < N)[:, None] & (columns < width)[None, :]
        tl.store(d + i.to(tl.int64) * ROWS * width + j * COLUMNS + inside(width, ROWS, COLUMNS), rounded, mask=mask)
    if SUM:
        tl.store(shares + i.to(tl.int64) * width + columns, tl.sum(rounded.to(tl.float32), axis=0), mask=columns < width)


@triton.jit
def _product(
    a, b, add, out, M, N, K, a_row, a_col, b_row, b_col,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """out (M, N) = a (M, K) b (K, N), plus `add` in float32."""
    i, j = place(tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS))
    rows = i.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = j.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH).to(tl.int64)
    left = a + rows[:, None] * a_row + depth[None, :] * a_col
    right = b + depth[:, None] * b_row + columns[None, :] * b_col
    left_step, right_step = tl.full((), DEPTH, tl.int64) * a_col, tl.full((), DEPTH, tl.int64) * b_row
    sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, DEPTH):
        one = tl.load(left, mask=(rows < M)[:, None] & (depth < K - start)[None, :], other=0.0)
        other = tl.load(right, mask=(columns < N)[None, :] & (depth < K - start)[:, None], other=0.0)
        sum = tl.dot(one, other, sum, input_precision=PRECISION)
        left += left_step
        right += right_step
    at, mask = inside(N, ROWS, COLUMNS), (rows < M)[:, None] & (columns < N)[None, :]
    start = i.to(tl.int64) * ROWS * N + j * COLUMNS
    if ADD:
        sum += tl.load(add + start + at, mask=mask, other=0.0)
    tl.store(out + start + at, sum.to(out.dtype.element_ty), mask=mask)


def _multiply(a: Tensor, b: Tensor, add: Optional[Tensor], out: Tensor, how: dict[str, Any]) -> None:
    (M, K), N = a.shape, b.shape[1]
    grid = (triton.cdiv(M, how["ROWS"]) * triton.cdiv(N, how["COLUMNS"]),)
    _product[grid](a, b, out if add is None else add, out, M, N, K, *a.stride(), *b.stride(), ADD=add is not None, **how)


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
    *,
    columns: Optional[int] = None,
    warps: Optional[int] = None,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    needed, (V, H), how = needs.split(","), weight.shape, tile(x.dtype, columns, warps)
    rows = x.reshape(-1, H)
    N, (g, labels, total) = rows.shape[0], [t.reshape(-1) for t in (grad, target, lse)]
    width = min(V, max(triton.cdiv(V, PARTS), triton.cdiv(LEAST, N)))
    store = "x" in needed or "weight" in needed
    d = torch.empty(N * width if store else 1, dtype=x.dtype, device=x.device)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if "x" in needed else None
    sum = torch.empty((N, H), dtype=torch.float32, device=x.device) if dx is not None and width < V else None
    dweight = torch.empty((V, H), dtype=weight.dtype, device=x.device) if "weight" in needed else None
    blocks = triton.cdiv(N, how["ROWS"])
    dbias = torch.empty(V, dtype=x.dtype, device=x.device) if bias is not None and "bias" in needed else None
    for first in range(0, V, width):
        last = min(first + width, V)
        part, w = last - first, weight[first:last]
        part_of_bias = w if bias is None else bias[first:last]
        shares = torch.empty((blocks, part) if dbias is not None else (1,), dtype=torch.float32, device=x.device)
        _gradient[(blocks * triton.cdiv(part, how["COLUMNS"]),)](
            g, rows, w, part_of_bias, labels, total, d, shares, first, N, part, V, H,
            g.stride(0), *rows.stride(), *w.stride(), part_of_bias.stride(0), labels.stride(0), total.stride(0),
            ignore_index, label_smoothing, softcap or math.inf, z_loss,
            BIAS=bias is not None, SOFTCAP=softcap is not None, STORE=store, SUM=dbias is not None, **how,
        )  # fmt: skip
        share = d[: N * part].view(N, part) if store else d
        if dweight is not None:
            _multiply(share.t(), rows, None, dweight[first:last], how)
        if dx is not None:
            out = dx.view(N, H) if last == V or sum is None else sum
            _multiply(share, w, sum if first else None, out, how)
        if dbias is not None:
            dbias[first:last] = shares.sum(0)
    return dx, dweight, dbias
