"""linear_cross_entropy, forward, in Pallas: the vocabulary streams past a block of rows that stays in VMEM.

The running maximum, sum and logit of the target are kept per lane (rows, 128), so that a block of the vocabulary costs no
reduction across lanes; the lanes of a row are merged once, at the last block.
"""

import functools
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
CHAIN = 64  # sums of float32 that follow each other
VMEM = 36 << 20  # reserved whole, beside what XLA prefetches: 48 MiB overflowed the 64 of a tpu7x; a v5p needs 34.4
ROWS_BYTES, COLUMNS_BYTES = 16 << 20, 8 << 20  # of x and of weight in VMEM, each block twice
MOST_ROWS, MOST_COLUMNS = 1024, 1280
TILE = 256  # rows whose logits are worked on at once: the next ones are multiplied under the vector work of these
WIDEST = COLUMNS_BYTES // (2 * LANES)  # bytes of a row
PARTS = {2: 0, 4: 6}  # bytes, by those of a number: a product of float32 stands in VMEM in three bfloat16 parts too


def up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def blocks(N: int, V: int, H: int, itemsize: int) -> tuple[int, int]:
    """Rows and columns of the vocabulary in a block."""
    rows = min(MOST_ROWS, ROWS_BYTES // (2 * H * itemsize) // TILE * TILE)
    columns = min(MOST_COLUMNS, max(LANES, COLUMNS_BYTES // (H * (2 * itemsize + PARTS[itemsize])) // LANES * LANES))
    return min(rows, up_to(N, TILE if N > TILE else 16)), min(columns, up_to(V, LANES))


def padded(t: jax.Array, rows: int, value: float = 0) -> jax.Array:
    """`t` with a number of rows that blocks divide."""
    more = up_to(len(t), rows) - len(t)
    return jnp.pad(t, ((0, more), *((0, 0) for _ in t.shape[1:])), constant_values=value) if more else t


def dot(a: Any, b: Any, contract: tuple[int, int]) -> Any:
    """Products of 16-bit numbers as they are, of float32 ones in as many passes as that takes; summed in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def product(x: Any, rows: Any, weight: Any) -> Any:
    """Rows of x times weight^T, (rows, columns), from references to blocks. Few float32 columns are summed in chains of at most 64:
    one of H rounds twice as coarsely, which exp shows. A long H is cut by the MXU's depth anyway.
    """
    H = x.shape[1]
    if x.dtype != jnp.float32 or not CHAIN < H < 4 * LANES:
        return dot(x[rows, :], weight[...], (1, 1))
    parts = [slice(k, min(k + CHAIN, H)) for k in range(0, H, CHAIN)]
    return functools.reduce(jnp.add, [dot(x[rows, part], weight[:, part], (1, 1)) for part in parts])


def _kernel(
    V: int, tile: int, has_bias: bool, ignore_index: int, label_smoothing: float, softcap: Optional[float], z_loss: float,
    x: Any, weight: Any, target: Any, *refs: Any,
) -> None:  # fmt: skip
    bias, (loss, lse, largest, sums, hits, *totals) = (refs[0], refs[1:]) if has_bias else (None, refs)
    j, last, width = pl.program_id(1), pl.num_programs(1) - 1, weight.shape[0]

    @pl.when(j == 0)
    def _() -> None:
        largest[...] = jnp.full_like(largest, -jnp.inf)
        for ref in (sums, hits, *totals):
            ref[...] = jnp.zeros_like(ref)

    lane = jax.lax.broadcasted_iota(jnp.int32, (tile, LANES), 1)

    def logits(i: int) -> Any:
        return product(x, pl.ds(i * tile, tile), weight)

    def work(ragged: bool) -> None:
        ahead = logits(0)
        for i in range(x.shape[0] // tile):
            at, z = pl.ds(i * tile, tile), ahead
            if (i + 1) * tile < x.shape[0]:
                ahead = logits(i + 1)
            parts = [z[:, c : c + LANES] for c in range(0, width, LANES)]
            if bias is not None:
                parts = [part + bias[:, c * LANES : (c + 1) * LANES] for c, part in enumerate(parts)]
            if softcap is not None:
                parts = [jnp.tanh(part / softcap) * softcap for part in parts]
            left = V - j * width - lane  # more than c * LANES where the column exists
            if totals:
                kept = [jnp.where(left > c * LANES, part, 0.0) if ragged else part for c, part in enumerate(parts)]
                totals[0][at, :] += functools.reduce(jnp.add, kept)
            if ragged:
                parts = [jnp.where(left > c * LANES, part, -jnp.inf) for c, part in enumerate(parts)]
            away = target[at, :] - lane - j * width  # c * LANES where the target is in part c
            old, hit = largest[at, :], hits[at, :]
            new = functools.reduce(jnp.maximum, parts, old)
            shift = jnp.where(new == -jnp.inf, 0.0, new)
            total = sums[at, :] * jnp.exp(old - shift)
            for c, part in enumerate(parts):
                total += jnp.exp(part - shift)
                hit = jnp.where(away == c * LANES, part, hit)
            largest[at, :], sums[at, :], hits[at, :] = new, total, hit

    if V % width:
        pl.when(j < last)(functools.partial(work, False))
        pl.when(j == last)(functools.partial(work, True))
    else:
        work(False)

    @pl.when(j == last)
    def _() -> None:
        top = jnp.max(largest[...], axis=1, keepdims=True)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        result = top + jnp.log(jnp.sum(sums[...] * jnp.exp(largest[...] - top), axis=1, keepdims=True))
        label = target[...]
        hit = jnp.where((label >= 0) & (label < V), jnp.sum(hits[...], axis=1, keepdims=True), jnp.nan)
        value = result - (1 - label_smoothing) * hit
        if totals:
            value -= label_smoothing / V * jnp.sum(totals[0][...], axis=1, keepdims=True)
        if z_loss:
            value += z_loss * result * result
        lse[...] = result
        loss[...] = jnp.where(label == ignore_index, 0.0, value)


def forward(
    x: jax.Array,
    weight: jax.Array,
    target: jax.Array,
    bias: Optional[jax.Array],
    ignore_index: int,
    label_smoothing: float,
    softcap: Optional[float],
    z_loss: float,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    V, H = weight.shape
    flat, labels = x.reshape(-1, H), target.reshape(-1, 1)
    N = flat.shape[0]
    rows, width = blocks(N, V, H, x.dtype.itemsize)
    flat, labels = padded(flat, rows), padded(labels, rows, ignore_index)
    column = pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
    arrays = [flat, padded(weight, width) if width > V else weight, labels]
    specs = [pl.BlockSpec((rows, H), lambda i, j: (i, 0)), pl.BlockSpec((width, H), lambda i, j: (j, 0)), column]
    if bias is not None:
        arrays.append(padded(bias.astype(jnp.float32), width)[None, :])
        specs.append(pl.BlockSpec((1, width), lambda i, j: (0, j)))
    kept = 4 if label_smoothing else 3
    grid = (len(flat) // rows, pl.cdiv(V, width))
    loss, lse = pl.pallas_call(
        functools.partial(_kernel, V, min(rows, TILE), bias is not None, ignore_index, label_smoothing, softcap, z_loss),
        out_shape=[jax.ShapeDtypeStruct((len(flat), 1), jnp.float32)] * 2,
        grid=grid,
        in_specs=specs,
        out_specs=[column, column],
        scratch_shapes=[pltpu.VMEM((rows, LANES), jnp.float32)] * kept,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM),
        cost_estimate=pl.CostEstimate(
            flops=2 * N * H * V, transcendentals=N * V, bytes_accessed=(N + grid[0] * V) * H * x.dtype.itemsize + 12 * N
        ),
        interpret=interpret,
    )(*arrays)
    return loss[:N, 0].reshape(target.shape), lse[:N, 0].reshape(target.shape)


def supports(
    target: str, x: Any, weight: Any, labels: Any, bias: Any, ignore_index: int, label_smoothing: float, softcap: Any, z_loss: float
) -> str | None:
    """A block holds whole rows of x and of weight."""
    widest = WIDEST // x.itemsize
    return f"H = {x.shape[-1]}: {LANES} rows of weight fit VMEM up to H = {widest}" if x.shape[-1] > widest else None
