"""gather_rows in Pallas: a DMA per row, all of a block's in flight at once; their numbers come block by block into scalar memory.

Rows of 16 bits stand in pairs in a TPU's words, eight to a tile of its memory, and a DMA takes whole tiles: the eight that hold the
row come, which is eight times the traffic, and the row is picked out of them in VMEM. A table whose last tile is not whole has that
one as an array of its own.
"""

import functools
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdk.backends.pallas import SCOPED_VMEM

MOST_ROWS = 256  # of a block
TUNABLE = {"rows": (16, 32, 64, 128, 256, 512, 1024)}  # of a block
BUFFER = 4 << 20  # bytes of rows in flight
LEAST_ROWS = 16  # a tile of bfloat16


def together(dtype: Any) -> int:
    """Rows that a DMA brings: one of 32 bits, or the eight of a tile."""
    return 1 if jnp.dtype(dtype).itemsize == 4 else 8


def block_rows(N: int, H: int, dtype: Any, rows: Optional[int]) -> int:
    """Rows of a block: the given ones, or as many as the buffer holds; a multiple of the least."""
    if rows is None:
        rows = min(BUFFER // (together(dtype) * H * jnp.dtype(dtype).itemsize) // LEAST_ROWS * LEAST_ROWS, MOST_ROWS)
    return max(LEAST_ROWS, min(rows, pl.cdiv(N, LEAST_ROWS) * LEAST_ROWS))


def in_blocks(index: jax.Array, rows: int) -> jax.Array:
    """The numbers (N,) as one block after the other, (blocks, 1, rows), zeros behind the last."""
    flat = index.reshape(-1)
    return jnp.pad(flat, (0, -flat.shape[0] % rows)).reshape(-1, 1, rows)


def _kernel(whole: int, group: int, index: Any, table: Any, tail: Any, out: Any, buffer: Any, picked: Any, arrived: Any) -> None:
    """whole: the table's rows in whole groups; those behind it stand in `tail`."""
    rows, H = out.shape

    def copy(source: Any, start: Any, j: Any) -> Any:
        place = buffer.at[pl.ds(j, 1)] if group == 1 else buffer.at[j]
        return pltpu.make_async_copy(source.at[pl.ds(start, group)], place, arrived)

    def begin(j: Any, carry: Any) -> Any:
        start = pl.multiple_of(index[0, 0, j] // group * group, group)

        if whole:  # a table of fewer rows than a group has none to copy from

            @pl.when(start < whole)
            def from_table() -> None:
                copy(table, start, j).start()

        @pl.when(start >= whole)
        def from_tail() -> None:
            copy(tail, 0, j).start()

        return carry

    def end(j: Any, carry: Any) -> Any:
        copy(tail, 0, j).wait()  # for as many bytes as any of them has
        return carry

    def pick(j: Any, carry: Any) -> Any:
        eight = buffer[j].astype(jnp.float32)
        mine = jax.lax.broadcasted_iota(jnp.int32, (group, H), 0) == index[0, 0, j] % group
        # A choice and no product with ones and zeros: the others may be infinite.
        picked[pl.ds(j, 1), :] = jnp.where(mine, eight, 0.0).sum(0, keepdims=True)
        return carry

    jax.lax.fori_loop(0, rows, begin, 0)
    jax.lax.fori_loop(0, rows, end, 0)
    if group == 1:
        out[...] = buffer[...]
    else:
        jax.lax.fori_loop(0, rows, pick, 0)
        out[...] = picked[...].astype(out.dtype)


def forward(table: jax.Array, index: jax.Array, *, rows: Optional[int] = None, interpret: Any = False) -> jax.Array:
    (R, H), N, group = table.shape, index.size, together(table.dtype)
    rows = block_rows(N, H, table.dtype, rows)
    numbers = in_blocks(index, rows)
    whole = R // group * group
    tail = jnp.pad(table[whole:], ((0, group - (R - whole)), (0, 0)))
    out = pl.pallas_call(
        functools.partial(_kernel, whole, group),
        out_shape=jax.ShapeDtypeStruct((N, H), table.dtype),
        grid=(numbers.shape[0],),
        in_specs=[
            pl.BlockSpec((1, 1, rows), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec((rows, H), lambda i: (i, 0)),
        scratch_shapes=[
            # The groups of 16-bit rows in a dimension of their own: a tile of tpu7x would hold two of them.
            pltpu.VMEM((rows, H) if group == 1 else (rows, group, H), table.dtype),
            pltpu.VMEM((rows if group > 1 else 8, H), jnp.float32),
            pltpu.SemaphoreType.DMA,
        ],
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=(group + 1) * N * H * table.dtype.itemsize + 4 * N),
        interpret=interpret,
    )(numbers, table, tail)
    return out.reshape(*index.shape, H)


def widest(target: str, dtype: Any, rows: int = LEAST_ROWS) -> int:
    """The longest row of which so large a block fits VMEM: in flight, picked, and twice as the result."""
    size = jnp.dtype(dtype).itemsize
    bytes_per_column = rows * (together(dtype) * size + 4 + 2 * size)
    return SCOPED_VMEM.get(target, min(SCOPED_VMEM.values())) // bytes_per_column // 128 * 128


def supports(target: str, table: Any, index: Any, *, rows: Optional[int] = None) -> str | None:
    rows = rows or LEAST_ROWS
    limit = widest(target, str(table.dtype).removeprefix("torch."), rows)
    return f"H = {table.shape[1]}: {rows} rows fit up to H = {limit}" if table.shape[1] > limit else None
