"""scatter_add_rows in Pallas: the rows in the order of their numbers (sorted outside, taken by gather_rows), added up in blocks.

In that order the blocks of the result and the blocks of rows that meet form a staircase: a grid of at most as many steps as there
are blocks of both, whatever the numbers are. A block of the result stays in VMEM, in float32, while rows are added to it one by one,
and is written once. One after the other also means: the same bits in every run, and an infinity stays in its own row, which it
would not in a product with a matrix of ones and zeros.
"""

from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdk.backends.pallas import SCOPED_VMEM
from kdk_kernels.gather_rows import pallas as gather

BLOCK = 2 << 20  # bytes of float32 in a block of rows, and in one of the result
LEAST_ROWS = 16  # of a block: a tile of bfloat16
MOST_ROWS = 512
TUNABLE = {"block": (16, 32, 64, 128, 256, 512, 1024)}  # rows of a block of rows, and of one of the result
MOST_STEPS = 64_000  # three numbers each, in 1 MiB of scalar memory


def block_rows(N: int, H: int, block: Optional[int]) -> int:
    rows = block or min(BLOCK // (4 * H) // LEAST_ROWS * LEAST_ROWS, MOST_ROWS)
    return max(LEAST_ROWS, min(rows, pl.cdiv(N, LEAST_ROWS) * LEAST_ROWS))


def _kernel(to_block: Any, from_block: Any, live: Any, index: Any, rows: Any, out: Any, wide: Any, sums: Any) -> None:
    """A step: what of one block of rows belongs to one block of the result."""
    step, steps = pl.program_id(0), pl.num_programs(0)
    mine = to_block[step]
    start = mine * out.shape[0]

    @pl.when((step == 0) | (mine != to_block[jnp.maximum(step - 1, 0)]))
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    @pl.when(live[step] == 1)
    def _() -> None:
        wide[...] = rows[...].astype(jnp.float32)

        def add(j: Any, carry: Any) -> Any:
            place = index[0, 0, j] - start

            @pl.when((place >= 0) & (place < out.shape[0]))
            def _() -> None:
                sums[pl.ds(place, 1), :] += wide[pl.ds(j, 1), :]

            return carry

        jax.lax.fori_loop(0, wide.shape[0], add, 0)

    @pl.when((step == steps - 1) | (mine != to_block[jnp.minimum(step + 1, steps - 1)]))
    def _() -> None:
        out[...] = sums[...].astype(out.dtype)


def _staircase(numbers: jax.Array, out_rows: int, out_blocks: int, in_rows: int, in_blocks: int) -> tuple[jax.Array, ...]:
    """For every step the block of the result, the block of rows, and whether they meet. numbers: sorted.

    A block of the result that nothing is added to has a step too, in which it is written as zeros.
    """
    bounds = jnp.searchsorted(numbers, jnp.arange(out_blocks + 1, dtype=jnp.int32) * out_rows).astype(jnp.int32)
    low, high = bounds[:-1], bounds[1:]
    some = high > low
    first = jnp.minimum(low // in_rows, in_blocks - 1)
    count = jnp.where(some, (high - 1) // in_rows - first + 1, 1)
    begin = jnp.cumsum(count) - count
    step = jnp.arange(out_blocks + in_blocks - 1, dtype=jnp.int32)
    to_block = jnp.clip(jnp.searchsorted(begin, step, side="right") - 1, 0, out_blocks - 1).astype(jnp.int32)
    k = step - begin[to_block]
    live = some[to_block] & (k < count[to_block])
    return to_block, jnp.minimum(first[to_block] + k, in_blocks - 1), live.astype(jnp.int32)


def forward(
    index: jax.Array, rows: jax.Array, num_rows: int, deterministic: bool, *, block: Optional[int] = None, interpret: Any = False
) -> jax.Array:
    H, N = rows.shape[-1], index.size
    sorted_index, order = jax.lax.sort_key_val(index.reshape(-1), jnp.arange(N, dtype=jnp.int32))
    sorted_rows = gather.forward(rows.reshape(-1, H), order, interpret=interpret)
    in_rows, out_rows = block_rows(N, H, block), block_rows(num_rows, H, block)
    # Behind the last number stand some that belong to no row.
    numbers = jnp.pad(sorted_index, (0, -N % in_rows), constant_values=jnp.iinfo(jnp.int32).max)
    out_blocks, in_blocks = pl.cdiv(num_rows, out_rows), pl.cdiv(N, in_rows)
    steps = _staircase(numbers, out_rows, out_blocks, in_rows, in_blocks)
    return pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((num_rows, H), rows.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(out_blocks + in_blocks - 1,),
            in_specs=[
                pl.BlockSpec((1, 1, in_rows), lambda s, to, at, live: (at[s], 0, 0), memory_space=pltpu.SMEM),
                pl.BlockSpec((in_rows, H), lambda s, to, at, live: (at[s], 0)),
            ],
            out_specs=pl.BlockSpec((out_rows, H), lambda s, to, at, live: (to[s], 0)),
            scratch_shapes=[pltpu.VMEM((in_rows, H), jnp.float32), pltpu.VMEM((out_rows, H), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=N * H, transcendentals=0, bytes_accessed=(N + num_rows) * H * rows.dtype.itemsize + 4 * N),
        interpret=interpret,
    )(*steps, numbers.reshape(in_blocks, 1, in_rows), sorted_rows)


def supports(target: str, index: Any, rows: Any, num_rows: int, deterministic: bool, *, block: Optional[int] = None) -> str | None:
    H, N, least = rows.shape[-1], index.numel(), block or LEAST_ROWS
    name = str(rows.dtype).removeprefix("torch.")
    bytes_per_column = least * 2 * (4 + 2 * rows.itemsize)  # a block of rows and one of the result: twice, and in float32
    vmem = SCOPED_VMEM.get(target, min(SCOPED_VMEM.values()))
    limit = min(gather.widest(target, name), vmem // bytes_per_column // 128 * 128)
    if limit < H:
        return f"H = {H}: {least} rows fit up to H = {limit}"
    steps = -(-N // block_rows(N, H, block)) + -(-num_rows // block_rows(num_rows, H, block))
    if steps > MOST_STEPS:
        return f"{N} rows into {num_rows} of H = {H}: {steps} steps, scalar memory holds {MOST_STEPS}"
    return None
