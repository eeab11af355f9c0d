"""Rotary position embedding for GPUs: one program per token, which reads the tables once and turns every head."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Pairs that one program holds at a time. Of a 32 x 128 query that is every head: with 4 warps each thread moves
# 2 x 16 elements, in 16-byte accesses for 16-bit dtypes.
PAIRS_PER_TILE = 2048


def forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    q_out, k_out = new_like(q), new_like(k)
    rotate([(q, q_out), (k, k_out)], cos, sin, interleaved, transposed=False)
    return q_out, k_out


def new_like(x: Tensor) -> Tensor:
    """Contiguous and without data, whatever the strides of x."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def rotate(jobs: list[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool) -> None:
    """Write the rotation of one or two tensors (..., S, H, D) into their outputs, in one launch."""
    first, second = jobs[0], jobs[-1]
    (x, x_out), (y, y_out) = ([_with_batch(t, 4) for t in job] for job in (first, second))
    batch, tokens, x_heads, dim = x.shape
    y_heads = y.shape[2] if len(jobs) == 2 else 0
    # A table shared by all sequences is read with a batch stride of 0.
    cos, sin = (_with_batch(t, 3).expand(batch, -1, -1) for t in (cos, sin))
    rotary = cos.shape[-1]
    block_pairs = triton.next_power_of_2(rotary // 2)
    _rotate_tokens[(batch * tokens,)](
        x,
        x_out,
        y,
        y_out,
        cos,
        sin,
        tokens,
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
        BLOCK_X=_heads_per_tile(x_heads, block_pairs),
        BLOCK_Y=_heads_per_tile(y_heads, block_pairs),
        BLOCK_PAIRS=block_pairs,
        BLOCK_REST=triton.next_power_of_2(max(dim - rotary, 1)),
        INTERLEAVED=interleaved,
        TRANSPOSED=transposed,
        num_warps=4,
    )


def _with_batch(x: Tensor, rank: int) -> Tensor:
    return x if x.dim() == rank else x.unsqueeze(0)


def _heads_per_tile(heads: int, block_pairs: int) -> int:
    return min(triton.next_power_of_2(max(heads, 1)), max(PAIRS_PER_TILE // block_pairs, 1))


@triton.jit
def _rotate_tokens(
    x,
    x_out,
    y,
    y_out,
    cos,
    sin,
    tokens,
    x_batch,
    x_token,
    x_head,
    x_dim,
    x_out_batch,
    x_out_token,
    x_out_head,
    y_batch,
    y_token,
    y_head,
    y_dim,
    y_out_batch,
    y_out_token,
    y_out_head,
    cos_batch,
    cos_token,
    cos_dim,
    sin_batch,
    sin_token,
    sin_dim,
    X_HEADS: tl.constexpr,
    Y_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """x and y (B, S, heads, DIM) by cos and sin (B, S, ROTARY); names of strides are <tensor>_<axis>."""
    program = tl.program_id(0)
    batch = (program // tokens).to(tl.int64)
    token = (program % tokens).to(tl.int64)

    cos_row = cos + batch * cos_batch + token * cos_token
    sin_row = sin + batch * sin_batch + token * sin_token
    cos_1, cos_2 = _load_pairs(cos_row, 0, cos_dim, 0, 1, 1, ROTARY, BLOCK_PAIRS, INTERLEAVED)
    sin_1, sin_2 = _load_pairs(sin_row, 0, sin_dim, 0, 1, 1, ROTARY, BLOCK_PAIRS, INTERLEAVED)
    if TRANSPOSED:
        sin_1, sin_2 = -sin_2, -sin_1

    _rotate_heads(
        x + batch * x_batch + token * x_token,
        x_out + batch * x_out_batch + token * x_out_token,
        x_head, x_dim, x_out_head, cos_1, cos_2, sin_1, sin_2,
        X_HEADS, DIM, ROTARY, BLOCK_X, BLOCK_PAIRS, BLOCK_REST, INTERLEAVED,
    )  # fmt: skip
    _rotate_heads(
        y + batch * y_batch + token * y_token,
        y_out + batch * y_out_batch + token * y_out_token,
        y_head, y_dim, y_out_head, cos_1, cos_2, sin_1, sin_2,
        Y_HEADS, DIM, ROTARY, BLOCK_Y, BLOCK_PAIRS, BLOCK_REST, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def _rotate_heads(
    row, out_row, head_stride, dim_stride, out_head_stride, cos_1, cos_2, sin_1, sin_2,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """All heads of one token, BLOCK at a time."""
    for start in range(0, HEADS, BLOCK):
        x_1, x_2 = _load_pairs(row, head_stride, dim_stride, start, HEADS, BLOCK, ROTARY, BLOCK_PAIRS, INTERLEAVED)
        _store_pairs(
            out_row, out_head_stride, start, x_1 * cos_1 - x_2 * sin_1, x_2 * cos_2 + x_1 * sin_2,
            HEADS, BLOCK, ROTARY, BLOCK_PAIRS, INTERLEAVED,
        )  # fmt: skip
        if DIM > ROTARY:
            heads = (start + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
            dims = (ROTARY + tl.arange(0, BLOCK_REST)).to(tl.int64)[None, :]
            inside = (heads < HEADS) & (dims < DIM)
            rest = tl.load(row + heads * head_stride + dims * dim_stride, mask=inside)
            tl.store(out_row + heads * out_head_stride + dims, rest, mask=inside)


@triton.jit
def _load_pairs(
    row, head_stride, dim_stride, start,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The first and second members of the pairs of BLOCK heads, (BLOCK, BLOCK_PAIRS) each, in float32."""
    heads = (start + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    heads_row = row + heads * head_stride
    if INTERLEAVED:
        # One contiguous load, split in registers: loads of every other element would not be wide.
        dims = tl.arange(0, 2 * BLOCK_PAIRS).to(tl.int64)[None, :]
        inside = (heads < HEADS) & (dims < ROTARY)
        both = tl.load(heads_row + dims * dim_stride, mask=inside).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (BLOCK, BLOCK_PAIRS, 2)))
    else:
        pairs = tl.arange(0, BLOCK_PAIRS).to(tl.int64)[None, :]
        inside = (heads < HEADS) & (pairs < ROTARY // 2)
        first = tl.load(heads_row + pairs * dim_stride, mask=inside).to(tl.float32)
        second = tl.load(heads_row + (pairs + ROTARY // 2) * dim_stride, mask=inside).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(
    row, head_stride, start, first, second,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The inverse of `_load_pairs`; the elements of a head lie side by side."""
    dtype = row.dtype.element_ty
    heads = (start + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    heads_row = row + heads * head_stride
    if INTERLEAVED:
        dims = tl.arange(0, 2 * BLOCK_PAIRS).to(tl.int64)[None, :]
        both = tl.reshape(tl.join(first, second), (BLOCK, 2 * BLOCK_PAIRS)).to(dtype)
        tl.store(heads_row + dims, both, mask=(heads < HEADS) & (dims < ROTARY))
    else:
        pairs = tl.arange(0, BLOCK_PAIRS).to(tl.int64)[None, :]
        inside = (heads < HEADS) & (pairs < ROTARY // 2)
        tl.store(heads_row + pairs, first.to(dtype), mask=inside)
        tl.store(heads_row + pairs + ROTARY // 2, second.to(dtype), mask=inside)
