"""linear_cross_entropy, forward, in Pallas: the vocabulary streams past a block of rows that stays in VMEM.

The logits stand on their side, the vocabulary on the sublanes and rows of x on the lanes: the matrix units keep x and let weight
run through, and the running maximum, sum and logit of the target are (8, rows), few registers, merged over the sublanes at the last
block. The vector work of a tile of logits goes on under the product of the next one, and that of a block's last tile under the first
product of the next block, for which it waits in VMEM.
"""

import functools
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 8
CHAIN = 64  # sums of float32 that follow each other
VMEM = 36 << 20  # reserved whole, beside what XLA prefetches: 48 MiB overflowed the 64 of a tpu7x
ROWS_BYTES, COLUMNS_BYTES, LEAST_COLUMNS_BYTES = 16 << 20, 14 << 20, 8 << 20  # of x and of weight in VMEM, each block twice
BOTH_BYTES = 24 << 20
TILE_BYTES = 2 << 20  # of the logits that are worked on at once, in float32
MOST_ROWS, MOST_COLUMNS, MOST_TILE = 1024, 3072, 1024
TUNABLE = {"rows": (128, 256, 512, 1024), "columns": (256, 512, 1024, 2048, 3072)}  # of a block, of x and of the vocabulary
WIDEST = LEAST_COLUMNS_BYTES // (2 * LANES)  # bytes of a row
PARTS = {2: 0, 4: 6}  # bytes, by those of a number: a product of float32 stands in VMEM in three bfloat16 parts too


def up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def stored(H: int, itemsize: int) -> int:
    """Bytes that a row of x or of weight takes in VMEM."""
    return H * (2 * itemsize + PARTS[itemsize])


def blocks(N: int, V: int, H: int, itemsize: int, rows: Optional[int], columns: Optional[int]) -> tuple[int, int, int]:
    """Rows and columns of the vocabulary in a block, the given ones or as many as fit; columns in a tile, of which a block is a
    multiple."""
    each = stored(H, itemsize)
    rows = min(up_to(N, LANES), rows or min(MOST_ROWS, max(LANES, ROWS_BYTES // each // LANES * LANES)))
    space = max(LEAST_COLUMNS_BYTES, min(COLUMNS_BYTES, BOTH_BYTES - rows * each))
    columns = min(up_to(V, LANES), columns or min(MOST_COLUMNS, max(LANES, space // each // LANES * LANES)))
    tile = min(columns, MOST_TILE, TILE_BYTES // (4 * rows) // LANES * LANES)
    return rows, columns // tile * tile, tile


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
    """Rows of x times weight^T, (rows, columns), from references to blocks; or rows of weight times x^T. Few float32 columns are
    summed in chains of at most 64: one of H rounds twice as coarsely, which exp shows. A long H is cut by the MXU's depth anyway.
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
    bias, (loss, lse, largest, sums, hits, waiting, *totals) = (refs[0], refs[1:]) if has_bias else (None, refs)
    j, last, width, rows = pl.program_id(1), pl.num_programs(1) - 1, weight.shape[0], x.shape[0]
    shape = (tile // SUBLANES, SUBLANES, rows)  # of a tile, by register
    sublane = jax.lax.broadcasted_iota(jnp.int32, shape[1:], 0)

    @pl.when(j == 0)
    def _() -> None:
        for ref in (largest, waiting):
            ref[...] = jnp.full_like(ref, -jnp.inf)
        for ref in (sums, hits, *totals):
            ref[...] = jnp.zeros_like(ref)

    def logits(i: int) -> Any:
        z = product(weight, pl.ds(i * tile, tile), x)
        if bias is not None:
            z += _on_its_side(bias[:, i * tile : (i + 1) * tile], rows)
        return z if softcap is None else jnp.tanh(z / softcap) * softcap

    def take(z: Any, start: Any, ragged: bool) -> None:
        """A tile of logits, from column `start` on; before the first one of -inf, from a negative column on."""
        z = z.reshape(shape)
        exists = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * SUBLANES < V - start - sublane
        if totals:
            added = jnp.sum(jnp.where(exists, z, 0.0) if ragged else z, 0)
            totals[0][...] += jnp.where(start < 0, 0.0, added)
        if ragged:
            z = jnp.where(exists, z, -jnp.inf)
        away, hit = target[...] - start - sublane, hits[...]
        for k in range(shape[0]):  # one by one: a select instead of a select and a sum
            hit = jnp.where(away == k * SUBLANES, z[k], hit)
        hits[...] = hit
        old = largest[...]
        new = jnp.maximum(old, jnp.max(z, 0))
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        sums[...] = sums[...] * jnp.exp(old - shift) + jnp.sum(jnp.exp(z - shift), 0)
        largest[...] = new

    def work(ragged: bool) -> None:
        z, start = waiting[...], j * width - tile
        for i in range(width // tile):
            ahead = logits(i)
            take(z, start + i * tile, ragged and i > 0)
            z = ahead
        waiting[...] = z

    if V % width:
        pl.when(j < last)(functools.partial(work, False))
        pl.when(j == last)(functools.partial(work, True))
    else:
        work(False)

    @pl.when(j == last)
    def _() -> None:
        take(waiting[...], (j + 1) * width - tile, V % width != 0)
        top = jnp.max(largest[...], axis=0, keepdims=True)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        result = top + jnp.log(jnp.sum(sums[...] * jnp.exp(largest[...] - top), axis=0, keepdims=True))
        label = target[...]
        hit = jnp.where((label >= 0) & (label < V), jnp.sum(hits[...], axis=0, keepdims=True), jnp.nan)
        value = result - (1 - label_smoothing) * hit
        if totals:
            value -= label_smoothing / V * jnp.sum(totals[0][...], axis=0, keepdims=True)
        if z_loss:
            value += z_loss * result * result
        lse[...] = result
        loss[...] = jnp.where(label == ignore_index, 0.0, value)


def _on_its_side(bias: Any, rows: int) -> Any:
    """(1, columns) as (columns, rows), the same in all rows: a transposition of 128 x 128 at a time, which costs less than it seems."""
    parts = [bias[:, c : c + LANES] for c in range(0, bias.shape[1], LANES)]
    turned = [jnp.broadcast_to(part, (LANES, LANES)).T for part in parts]
    return jnp.concatenate([jnp.concatenate([part] * (rows // LANES), 1) for part in turned], 0)


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
    rows: Optional[int] = None,
    columns: Optional[int] = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    V, H = weight.shape
    flat, labels = x.reshape(-1, H), target.reshape(-1)
    N = flat.shape[0]
    rows, width, tile = blocks(N, V, H, x.dtype.itemsize, rows, columns)
    flat, labels = padded(flat, rows), padded(labels, rows, ignore_index)[None, :]
    row = pl.BlockSpec((1, rows), lambda i, j: (0, i))
    arrays = [flat, padded(weight, width) if width > V else weight, labels]
    specs = [pl.BlockSpec((rows, H), lambda i, j: (i, 0)), pl.BlockSpec((width, H), lambda i, j: (j, 0)), row]
    if bias is not None:
        arrays.append(padded(bias.astype(jnp.float32), width)[None, :])
        specs.append(pl.BlockSpec((1, width), lambda i, j: (0, j)))
    kept = [(SUBLANES, rows)] * 3 + [(tile, rows)] + [(SUBLANES, rows)] * bool(label_smoothing)
    grid = (len(flat) // rows, pl.cdiv(V, width))
    loss, lse = pl.pallas_call(
        functools.partial(_kernel, V, tile, bias is not None, ignore_index, label_smoothing, softcap, z_loss),
        out_shape=[jax.ShapeDtypeStruct((1, len(flat)), jnp.float32)] * 2,
        grid=grid,
        in_specs=specs,
        out_specs=[row, row],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in kept],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM),
        cost_estimate=pl.CostEstimate(
            flops=2 * N * H * V, transcendentals=N * V, bytes_accessed=(N + grid[0] * V) * H * x.dtype.itemsize + 12 * N
        ),
        interpret=interpret,
    )(*arrays)
    return loss[0, :N].reshape(target.shape), lse[0, :N].reshape(target.shape)


def supports(
    target: str, x: Any, weight: Any, labels: Any, bias: Any, ignore_index: int, label_smoothing: float, softcap: Any, z_loss: float,
    *, rows: Optional[int] = None, columns: Optional[int] = None,
) -> str | None:  # fmt: skip
    """A block holds whole rows of x and of weight."""
    (V, H), widest = weight.shape, WIDEST // x.itemsize
    if widest < H:
        return f"H = {H}: {LANES} rows of weight fit VMEM up to H = {widest}"
    if rows is None and columns is None:
        return None
    tall, wide, _ = blocks(labels.numel(), V, H, x.itemsize, rows, columns)
    most = BOTH_BYTES // stored(H, x.itemsize)
    return f"{tall} rows of x and {wide} of weight: VMEM holds {most} together" if tall + wide > most else None
