"""Rotary position embedding for GPUs: one program per few tokens, which reads their tables once and turns every head."""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

# Pairs that one program holds at a time. With 4 warps a thread moves 2 x 16 elements, in 16-byte accesses for 16-bit dtypes;
# of a 32 x 128 query that is every head of one token.
PAIRS_PER_TILE = 2048
TUNABLE = {"pairs": (256, 512, 1024, 2048, 4096), "warps": (1, 2, 4, 8, 16)}  # of a program


def forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, pairs: Optional[int] = None, warps: Optional[int] = None
) -> tuple[Tensor, Tensor]:
    q_out, k_out = new_like(q), new_like(k)
    rotate([(q, q_out), (k, k_out)], cos, sin, interleaved, transposed=False, pairs=pairs, warps=warps)
    return q_out, k_out


def new_like(x: Tensor) -> Tensor:
    """Contiguous and without data, whatever the strides of x."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def rotate(
    jobs: list[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool,
    pairs: Optional[int], warps: Optional[int],
) -> None:  # fmt: skip
    """Write the rotation of one or two tensors (..., S, heads, D) into their outputs, in one launch."""
    (x, x_out), (y, y_out) = ([_with_batch(t, 4) for t in job] for job in (jobs[0], jobs[-1]))
    batch, sequence, x_heads, dim = x.shape
    y_heads = y.shape[2] if len(jobs) == 2 else 0
    # A table shared by all sequences is read with a batch stride of 0.
    cos, sin = (_with_batch(t, 3).expand(batch, -1, -1) for t in (cos, sin))
    rotary = cos.shape[-1]
    block_pairs = triton.next_power_of_2(rotary // 2)
    block_rest = triton.next_power_of_2(max(dim - rotary, 1))
    heads_per_tile = max((pairs or PAIRS_PER_TILE) // max(block_pairs, block_rest // 2), 1)
    block_x, block_y = (min(triton.next_power_of_2(max(heads, 1)), heads_per_tile) for heads in (x_heads, y_heads))
    block_tokens = min(heads_per_tile // max(block_x, block_y), triton.next_power_of_2(batch * sequence))
    _rotate_tokens[(triton.cdiv(batch * sequence, block_tokens),)](
        x,
        x_out,
        y,
        y_out,
        cos,
        sin,
        batch,
        sequence,
        *x.stride(),
        *x_out.stride()[:3],
        *y.stride(),
        *y_out.stride()[:3],
        *cos.stride(),
        *sin.stride(),
        X_HEADS=x_heads,
        Y_HEADS=y_heads,
        DIM=dim,
        ROTARY=rotary,
        BLOCK_TOKENS=block_tokens,
        BLOCK_X=block_x,
        BLOCK_Y=block_y,
        BLOCK_PAIRS=block_pairs,
        BLOCK_REST=block_rest,
        INTERLEAVED=interleaved,
        TRANSPOSED=transposed,
        num_warps=warps or 4,
    )


def _with_batch(x: Tensor, rank: int) -> Tensor:
    return x if x.dim() == rank else x.unsqueeze(0)


@triton.jit
def _rotate_tokens(
    x, x_out, y, y_out, cos, sin, batch, sequence,
    x_batch, x_token, x_head, x_dim, x_out_batch, x_out_token, x_out_head,
    y_batch, y_token, y_head, y_dim, y_out_batch, y_out_token, y_out_head,
    cos_batch, cos_token, cos_dim, sin_batch, sin_token, sin_dim,
    X_HEADS: tl.constexpr, Y_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """x and y (B, S, heads, DIM) by cos and sin (B, S, ROTARY); strides are called <tensor>_<axis>. Tiles are (tokens, heads, pairs)."""
    # Only the first token of the block needs 64-bit division; the others are counted on from it.
    start = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS
    steps = (start % sequence).to(tl.int32) + tl.arange(0, BLOCK_TOKENS)[:, None, None]
    b = start // sequence + steps // sequence
    s = (steps % sequence).to(tl.int64)
    exists = b < batch

    cos_1, cos_2 = _load_pairs(
        cos + b * cos_batch + s * cos_token, exists, 0, 0, cos_dim, 1, 1, ROTARY, BLOCK_TOKENS, BLOCK_PAIRS, INTERLEAVED
    )
    sin_1, sin_2 = _load_pairs(
        sin + b * sin_batch + s * sin_token, exists, 0, 0, sin_dim, 1, 1, ROTARY, BLOCK_TOKENS, BLOCK_PAIRS, INTERLEAVED
    )
    if TRANSPOSED:
        sin_1, sin_2 = -sin_2, -sin_1

    _rotate_heads(
        x + b * x_batch + s * x_token, x_out + b * x_out_batch + s * x_out_token, exists, x_head, x_dim, x_out_head,
        cos_1, cos_2, sin_1, sin_2, X_HEADS, DIM, ROTARY, BLOCK_TOKENS, BLOCK_X, BLOCK_PAIRS, BLOCK_REST, INTERLEAVED,
    )  # fmt: skip
    _rotate_heads(
        y + b * y_batch + s * y_token, y_out + b * y_out_batch + s * y_out_token, exists, y_head, y_dim, y_out_head,
        cos_1, cos_2, sin_1, sin_2, Y_HEADS, DIM, ROTARY, BLOCK_TOKENS, BLOCK_Y, BLOCK_PAIRS, BLOCK_REST, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def _rotate_heads(
    rows, out_rows, exists, head_stride, dim_stride, out_head_stride, cos_1, cos_2, sin_1, sin_2,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """All heads of the tokens that start at `rows`, BLOCK heads at a time."""
    for start in range(0, HEADS, BLOCK):
        x_1, x_2 = _load_pairs(rows, exists, start, head_stride, dim_stride, HEADS, BLOCK, ROTARY, BLOCK_TOKENS, BLOCK_PAIRS, INTERLEAVED)
        _store_pairs(
            out_rows, exists, start, out_head_stride, x_1 * cos_1 - x_2 * sin_1, x_2 * cos_2 + x_1 * sin_2,
            HEADS, BLOCK, ROTARY, BLOCK_TOKENS, BLOCK_PAIRS, INTERLEAVED,
        )  # fmt: skip
        if DIM > ROTARY:
            heads = (start + tl.arange(0, BLOCK)).to(tl.int64)[None, :, None]
            dims = (ROTARY + tl.arange(0, BLOCK_REST)).to(tl.int64)[None, None, :]
            inside = exists & (heads < HEADS) & (dims < DIM)
            rest = tl.load(rows + heads * head_stride + dims * dim_stride, mask=inside)
            tl.store(out_rows + heads * out_head_stride + dims, rest, mask=inside)


@triton.jit
def _load_pairs(
    rows, exists, start, head_stride, dim_stride, HEADS: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The first and the second members of the pairs of BLOCK heads, (tokens, BLOCK, pairs) each, in float32."""
    heads = (start + tl.arange(0, BLOCK)).to(tl.int64)[None, :, None]
    rows += heads * head_stride
    exists &= heads < HEADS
    if INTERLEAVED:
        # One contiguous load, split in registers: loads of every other element would not be wide.
        dims = tl.arange(0, 2 * BLOCK_PAIRS).to(tl.int64)[None, None, :]
        both = tl.load(rows + dims * dim_stride, mask=exists & (dims < ROTARY)).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (BLOCK_TOKENS, BLOCK, BLOCK_PAIRS, 2)))
    else:
        pairs = tl.arange(0, BLOCK_PAIRS).to(tl.int64)[None, None, :]
        inside = exists & (pairs < ROTARY // 2)
        first = tl.load(rows + pairs * dim_stride, mask=inside).to(tl.float32)
        second = tl.load(rows + (pairs + ROTARY // 2) * dim_stride, mask=inside).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(
    rows, exists, start, head_stride, first, second, HEADS: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The inverse of `_load_pairs`, into heads whose elements lie side by side."""
    dtype = rows.dtype.element_ty
    heads = (start + tl.arange(0, BLOCK)).to(tl.int64)[None, :, None]
    rows += heads * head_stride
    exists &= heads < HEADS
    if INTERLEAVED:
        dims = tl.arange(0, 2 * BLOCK_PAIRS).to(tl.int64)[None, None, :]
        both = tl.reshape(tl.join(first, second), (BLOCK_TOKENS, BLOCK, 2 * BLOCK_PAIRS)).to(dtype)
        tl.store(rows + dims, both, mask=exists & (dims < ROTARY))
    else:
        pairs = tl.arange(0, BLOCK_PAIRS).to(tl.int64)[None, None, :]
        inside = exists & (pairs < ROTARY // 2)
        tl.store(rows + pairs, first.to(dtype), mask=inside)
        tl.store(rows + pairs + ROTARY // 2, second.to(dtype), mask=inside)
