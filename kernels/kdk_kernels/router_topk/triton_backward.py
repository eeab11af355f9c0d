"""router_topk, backward, in Triton: the gradients of the weights are spread over a tile of whole rows, then it is row by row."""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdk_kernels.router_topk.triton import NUM_WARPS, TILE, WIDEST
from kdk_kernels.router_topk.triton import TUNABLE as TUNABLE


@triton.jit
def _centred(g, p):
    """g less its mean with the weights p; and the mean."""
    mean = tl.sum(p * g, axis=1, keep_dims=True)
    return g - mean, mean


@triton.jit
def _backward(
    grad, x, indices, dx, N, E, k, g_row, g_col, x_row, x_col, i_row, i_col, scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (rows < N) & (column < E)
    logits = tl.load(x + rows * x_row + column.to(tl.int64) * x_col, mask=inside, other=0.0).to(tl.float32)
    g = tl.zeros((ROWS, BLOCK), tl.float32)
    chosen = tl.zeros((ROWS, BLOCK), tl.int1)
    indices += rows * i_row
    grad += rows * g_row
    for _ in range(k):
        index = tl.load(indices, mask=rows < N, other=-1)
        value = tl.load(grad, mask=rows < N, other=0.0).to(tl.float32)
        indices += i_col
        grad += g_col
        hit = column == index
        g = tl.where(hit, value, g)
        chosen = chosen | hit
    if SOFTMAX:
        shared = chosen if RENORMALIZE else inside
        top = tl.max(tl.where(shared, logits, float("-inf")), axis=1, keep_dims=True)
        p = tl.where(shared, tl.exp(logits - top), 0.0)
        p = p / tl.sum(p, axis=1, keep_dims=True)
        h, _ = _centred(g, p)
        h, _ = _centred(h, p)  # twice: the reference says why
        result = tl.where(shared, p * h, 0.0)
    else:
        s, slope = 1.0 / (1.0 + tl.exp(-logits)), 1.0 / (1.0 + tl.exp(logits))
        if RENORMALIZE:
            total = tl.sum(tl.where(chosen, s, 0.0), axis=1, keep_dims=True) + 1e-20
            r = tl.where(chosen, s / total, 0.0)
            h, mean = _centred(g, r)
            h, _ = _centred(h, r)
            result = r * slope * (h + mean * (1e-20 / total))
        else:
            result = s * slope * g
        result = tl.where(chosen, result, 0.0)
    to = dx + rows * E + column
    tl.store(to, (result * scale).to(dx.dtype.element_ty), mask=inside)


def backward(
    grad_weights: Optional[Tensor], grad_indices: Optional[Tensor], logits: Tensor, indices: Tensor,
    scoring: str, renormalize: bool, scale: float, needs: str, *, elements: Optional[int] = None, warps: Optional[int] = None,
) -> Optional[Tensor]:  # fmt: skip
    if grad_weights is None:
        return None
    E, k = logits.shape[-1], indices.shape[-1]
    flat, at, grads = logits.reshape(-1, E), indices.reshape(-1, k), grad_weights.reshape(-1, k)
    N = flat.shape[0]
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    block = triton.next_power_of_2(E)
    # Half of the forward's tile: the gradients and the chosen stand in registers beside the logits.
    rows = max(1, (elements or TILE // 2) // block)
    _backward[(triton.cdiv(N, rows),)](
        grads, flat, at, dx, N, E, k, *grads.stride(), *flat.stride(), *at.stride(), scale,
        ROWS=rows, BLOCK=block, SOFTMAX=scoring == "softmax", RENORMALIZE=renormalize, num_warps=warps or NUM_WARPS,
    )  # fmt: skip
    return dx


def supports(
    target: str, grad_weights: Optional[Tensor], grad_indices: Optional[Tensor], logits: Tensor, indices: Tensor,
    scoring: str, renormalize: bool, scale: float, needs: str, *, elements: Optional[int] = None, warps: Optional[int] = None,
) -> str | None:  # fmt: skip
    E = logits.shape[-1]
    return f"E = {E}: a row fits a program up to {WIDEST} experts" if triton.next_power_of_2(E) > WIDEST else None
