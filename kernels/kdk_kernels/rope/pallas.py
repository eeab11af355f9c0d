"""Rotary position embedding for TPUs: blocks of tokens with all of their heads, rotated by turning the lanes.

A head's elements lie on the lanes. The partner of every element comes from rotating the lanes, by R/2 when the halves
are split and by one to either side when the pairs are interleaved: no strided access, which the hardware lacks.
"""

import functools
import math
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MAX_BLOCK_TOKENS = 64
MIN_BLOCK_TOKENS = 8
# Half of the 16 MiB that a kernel may use on the smallest target, which leaves room for the tables and for spills.
VMEM_BUDGET = 8 * 2**20
TUNABLE = {"tokens": (8, 16, 32, 64, 128, 256)}  # of a block


def forward(
    q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool,
    *, tokens: Optional[int] = None, interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    q_out, k_out = rotate([q, k], cos, sin, interleaved, transposed=False, block=tokens, interpret=interpret)
    return q_out, k_out


def rotate(
    tensors: list[jax.Array], cos: jax.Array, sin: jax.Array, interleaved: bool, transposed: bool, block: Optional[int], interpret: Any
) -> list[jax.Array]:
    """The rotation of tensors (..., S, H, D), all by the same tables (..., S, R), a block of tokens at a time."""
    shapes = [x.shape for x in tensors]
    flat = [x.reshape(-1, *x.shape[-2:]) for x in tensors]
    tokens, rotary = flat[0].shape[0], cos.shape[-1]
    block = _block_tokens(flat) if block is None else min(block, tokens)
    cos, sin, periods = _tables(cos, sin, tokens, block)

    # A table shared by the sequences starts again after every `periods` blocks.
    table = pl.BlockSpec((block, rotary), lambda i: (i % periods, 0))
    heads = [pl.BlockSpec((block, *x.shape[1:]), lambda i: (i, 0, 0)) for x in flat]
    moved = 2 * sum(x.size * x.dtype.itemsize for x in flat) + 2 * cos.size * cos.dtype.itemsize
    outputs = pl.pallas_call(
        functools.partial(_rotate_block, interleaved=interleaved, transposed=transposed),
        grid=(pl.cdiv(tokens, block),),
        in_specs=[table, table, *heads],
        out_specs=heads,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=3 * rotary * sum(math.prod(x.shape[:2]) for x in flat), bytes_accessed=moved, transcendentals=0
        ),
        interpret=interpret,
    )(cos, sin, *flat)
    return [out.reshape(shape) for out, shape in zip(outputs, shapes)]


def _rotate_block(cos_ref: Any, sin_ref: Any, *refs: Any, interleaved: bool, transposed: bool) -> None:
    """Tables (tokens, R); the inputs, then the outputs (tokens, heads, D)."""
    cos, sin = cos_ref[...].astype(jnp.float32), sin_ref[...].astype(jnp.float32)
    if transposed:
        sin = -_partner(sin, interleaved)
    # The sign of the rotation goes into the sines, once for all heads.
    sin = jnp.where(_is_first(sin.shape, interleaved), -sin, sin)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotary = cos.shape[-1]
    for x_ref, out_ref in zip(refs[: len(refs) // 2], refs[len(refs) // 2 :]):
        x = x_ref[:, :, :rotary].astype(jnp.float32)
        out_ref[:, :, :rotary] = (x * cos + _partner(x, interleaved) * sin).astype(out_ref.dtype)
        if rotary < x_ref.shape[-1]:
            out_ref[:, :, rotary:] = x_ref[:, :, rotary:]


def _partner(x: jax.Array, interleaved: bool) -> jax.Array:
    """x (..., R) with the two members of every pair exchanged."""
    axis, rotary = x.ndim - 1, x.shape[-1]
    if not interleaved:
        return pltpu.roll(x, rotary // 2, axis)
    after, before = pltpu.roll(x, rotary - 1, axis), pltpu.roll(x, 1, axis)
    return jnp.where(_is_first(x.shape, interleaved), after, before)


def _is_first(shape: tuple[int, ...], interleaved: bool) -> jax.Array:
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    return lane % 2 == 0 if interleaved else lane < shape[-1] // 2


def supports(target: str, q: Any, k: Any, cos: Any, sin: Any, interleaved: bool, *, tokens: Optional[int] = None) -> str | None:
    return too_many_heads([q, k], tokens)


def too_many_heads(tensors: list[Any], tokens: Optional[int]) -> str | None:
    """A block holds all heads of a few tokens."""
    if tokens is not None and tokens * _bytes_per_token(tensors) > 2 * VMEM_BUDGET:
        return f"tokens = {tokens}: a block fits VMEM up to {2 * VMEM_BUDGET // _bytes_per_token(tensors)} tokens"
    most, needed = 2 * VMEM_BUDGET // MIN_BLOCK_TOKENS, _bytes_per_token(tensors)
    if needed <= most:
        return None
    heads, dim = sum(x.shape[-2] for x in tensors), tensors[0].shape[-1]
    fitting = most * heads // needed
    return f"{heads} heads of D = {dim}: a block of {MIN_BLOCK_TOKENS} tokens fits VMEM up to {fitting} heads, of queries and keys together"


def _bytes_per_token(tensors: list[Any]) -> int:
    """VMEM for inputs and outputs twice (the next block is fetched meanwhile), and for two intermediates in float32."""
    return sum(x.shape[-2] * pl.cdiv(x.shape[-1], 128) * 128 * (4 * x.dtype.itemsize + 2 * 4) for x in tensors)


def _block_tokens(tensors: list[jax.Array]) -> int:
    fitting = 2 ** int(math.log2(max(VMEM_BUDGET // _bytes_per_token(tensors), MIN_BLOCK_TOKENS)))
    return min(fitting, MAX_BLOCK_TOKENS, tensors[0].shape[0])


def _tables(cos: jax.Array, sin: jax.Array, tokens: int, block: int) -> tuple[jax.Array, jax.Array, int]:
    """The tables as (rows, R), and after how many blocks the tokens reach their end."""
    rows = math.prod(cos.shape[:-1])
    if rows < tokens and rows % block:  # sequences that do not start at a block: a table for each of them
        cos, sin = (jnp.tile(t.reshape(rows, -1), (tokens // rows, 1)) for t in (cos, sin))
        rows = tokens
    return cos.reshape(rows, -1), sin.reshape(rows, -1), pl.cdiv(rows, block)
