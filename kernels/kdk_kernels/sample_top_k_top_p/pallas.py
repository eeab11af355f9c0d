"""sample_top_k_top_p in Pallas: whole rows in VMEM, thresholds by bisection on the bits of the logits, no sort.

A block of rows stays in VMEM while it is swept 32 times for each threshold, 16 times for bfloat16. Inside a kernel a TPU has no
gather and no running sum: the draw finds the chunk of columns in which the running sum passes its target, picks that chunk of
every row in one masked sweep, and finishes with a prefix sum by rotations of the lanes.
"""

import functools
from collections.abc import Callable
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdk_kernels.sample_top_k_top_p.reference import COLDEST

LANES = 128
WIDTH = 1024  # columns that a step of a sweep takes
UNROLL = 32  # steps of a sweep
TUNABLE = {"rows": (8, 16, 32, 64, 128), "unroll": (4, 8, 16, 32, 64)}  # of a block; steps of a sweep that are written out
COLUMNS = 5  # uniform, k, p, min_p, temperature of a row
LEAST_ROWS = 8  # of a block
BLOCK = 16 * 8192  # logits of a block of short rows; of long ones it has 16, where they fit
VMEM, SPARE = 40 << 20, 4 << 20  # bytes for a block, and beside it; a tpu7x has 64 MiB, of which XLA wants some


def ordered_bits(dtype: Any) -> tuple[int, Callable[[Any], Any], Callable[[Any], Any]]:
    """How many lower bits of a float32 such logits leave at 0, the other bits of one as an integer of the same order, and back."""
    shift = 8 * (4 - dtype.itemsize)  # a 16-bit logit is the upper half of a float32

    def ordered(bits: Any) -> Any:
        return bits ^ ((bits >> 31) & (0x7FFFFFFF >> shift))

    def bits(x: Any) -> Any:
        return ordered(jax.lax.bitcast_convert_type(x, jnp.int32) >> shift)

    def number(x: Any) -> Any:
        return jax.lax.bitcast_convert_type(ordered(x) << shift, jnp.float32)

    return shift, bits, number


def along(x: Any) -> Any:
    return jnp.sum(x, axis=1, keepdims=True)


def folded(x: Any) -> Any:
    """(rows, a multiple of 128) added up to (rows, 128)."""
    return functools.reduce(jnp.add, [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)])


def prefix(x: Any) -> Any:
    """Running sums along the lanes, by rotations."""
    lane, step = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1), 1
    while step < x.shape[1]:
        x = x + jnp.where(lane >= step, pltpu.roll(x, step, 1), 0.0)
        step *= 2
    return x


def first_above(weights: Any, target: Any) -> tuple[Any, Any]:
    """The first lane (rows, 1) whose running sum exceeds the target, at most the last that weighs anything; the running sums."""
    running = prefix(weights)
    lane = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    last = jnp.max(jnp.where(weights > 0.0, lane, 0), axis=1, keepdims=True)
    above = jnp.min(jnp.where(running > target, lane, weights.shape[1]), axis=1, keepdims=True)
    return jnp.minimum(above, last), running


def kernel(V: int, has_k: bool, has_p: bool, unroll: int, columns: Any, logits: Any, token: Any, logprob: Any, weights: Any) -> None:
    rows, padded = logits.shape
    full, rest = divmod(padded, WIDTH)
    uniform, k, p, min_p, temperature = (columns[:, i : i + 1] for i in range(COLUMNS))

    def chunk(c: Any) -> Any:
        return pl.ds(pl.multiple_of(c * WIDTH, WIDTH), WIDTH)

    def sweep(step: Callable[..., Any], start: float, combine: Callable[..., Any] = jnp.add) -> Any:
        """step(columns of a chunk, result so far) over all chunks; the result in 128 lanes."""
        found = jnp.full((rows, LANES), start, jnp.float32)
        if full:
            wide = jnp.full((rows, WIDTH), start, jnp.float32)
            wide = jax.lax.fori_loop(0, full, lambda c, so_far: combine(so_far, step(chunk(c))), wide, unroll=min(unroll, full))
            found = functools.reduce(combine, [wide[:, i : i + LANES] for i in range(0, WIDTH, LANES)])
        if rest:
            last = step(slice(full * WIDTH, padded))
            found = functools.reduce(combine, [last[:, i : i + LANES] for i in range(0, rest, LANES)], found)
        return found

    def read(where: Any) -> Any:
        return logits[:, where].astype(jnp.float32)

    most = jnp.max(sweep(read, -jnp.inf, jnp.maximum), axis=1, keepdims=True)
    per_degree = 1.0 / jnp.maximum(temperature, COLDEST)

    def weigh(where: Any) -> Any:
        weight = jnp.exp((read(where) - most) * per_degree)
        weights[:, where] = weight
        return weight

    everything = along(sweep(weigh, 0.0))
    shift, bits, number = ordered_bits(logits.dtype)

    def largest(measure: Callable[..., Any], wanted: Any, least: Any) -> Any:
        """The largest float from `least` to `most` at which the measure is what is wanted, or more."""

        def halve(_: Any, bounds: tuple[Any, Any]) -> tuple[Any, Any]:
            low, high = bounds
            middle = (low & high) + ((low ^ high) >> 1)
            good = measure(number(middle)) >= wanted
            return jnp.where(good, middle, low), jnp.where(good, high, middle)

        low, _ = jax.lax.fori_loop(0, 32 - shift, halve, (bits(least), bits(most) + 1))
        return number(low)

    def count(t: Any) -> Any:
        return along(sweep(lambda where: jnp.where(read(where) >= t, 1.0, 0.0), 0.0))

    def mass(t: Any) -> Any:
        return along(sweep(lambda where: jnp.where(read(where) >= t, weights[:, where], 0.0), 0.0))

    least, total = jnp.full((rows, 1), -jnp.inf, jnp.float32), everything
    if has_k:
        least = largest(count, jnp.where((k >= 1.0) & (k < V), k, float(V)), least)
        total = mass(least)
    if has_p:
        cut = largest(mass, jnp.maximum(p * total, COLDEST), least)
        least = jnp.where(p < 1.0, cut, least)

    groups = pl.cdiv(padded, WIDTH)
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, pl.cdiv(groups, LANES) * LANES), 1)

    def keep(where: Any) -> Any:
        weight = weights[:, where]
        kept = jnp.where((read(where) >= least) & (weight >= min_p), weight, 0.0)
        weights[:, where] = kept
        return along(kept)

    def keep_chunk(c: Any, sums: Any) -> Any:
        return jnp.where(lane == c, keep(chunk(c)), sums)

    sums = jnp.zeros(lane.shape, jnp.float32)
    if full:
        sums = jax.lax.fori_loop(0, full, keep_chunk, sums, unroll=min(unroll, full))
    if rest:
        sums = jnp.where(lane == full, keep(slice(full * WIDTH, padded)), sums)
        weights[:, padded:] = jnp.zeros((rows, WIDTH - rest), jnp.float32)
    running = prefix(sums)
    total = running[:, -1:]
    target = jnp.where(temperature > 0.0, uniform, 0.0) * total
    group, running = first_above(sums, target)
    left = target - along(jnp.where(lane < group, sums, 0.0))

    def pick(c: Any, picked: Any) -> Any:
        return jnp.where(group == c, weights[:, chunk(c)], picked)

    mine = jax.lax.fori_loop(0, groups, pick, jnp.zeros((rows, WIDTH), jnp.float32), unroll=min(unroll, groups))
    place, _ = first_above(mine, left)
    weight = along(jnp.where(jax.lax.broadcasted_iota(jnp.int32, mine.shape, 1) == place, mine, 0.0))
    is_distribution = everything > 0.0
    token[...] = jnp.where(is_distribution, group * WIDTH + place, -1)
    logprob[...] = jnp.where(is_distribution, jnp.log(weight) - jnp.log(total), jnp.nan)


def vmem(rows: int, V: int, itemsize: int) -> int:
    """Bytes of a block: the logits twice (the next block is fetched meanwhile), their weights in float32."""
    return -(-rows // LEAST_ROWS) * LEAST_ROWS * -(-V // WIDTH) * WIDTH * (2 * itemsize + 4)


def block_rows(V: int, itemsize: int) -> int:
    rows = max(16, BLOCK // (-(-V // WIDTH) * WIDTH) // 16 * 16)
    return rows if vmem(rows, V, itemsize) <= VMEM else LEAST_ROWS


def forward(
    logits: jax.Array,
    uniform: jax.Array,
    k: jax.Array | None,
    p: jax.Array | None,
    min_p: jax.Array | None,
    temperature: jax.Array | None,
    *,
    rows: Optional[int] = None,
    unroll: Optional[int] = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    N, V = logits.shape
    rows = min(N, rows or block_rows(V, logits.dtype.itemsize))
    if V % LANES:
        logits = jnp.pad(logits, ((0, 0), (0, -V % LANES)), constant_values=-jnp.inf)
    given = ((uniform, 0.0), (k, 0.0), (p, 1.0), (min_p, 0.0), (temperature, 1.0))
    columns = jnp.stack([jnp.full((N,), usual, jnp.float32) if x is None else x.astype(jnp.float32) for x, usual in given], axis=1)
    sweeps = 4 + (8 * logits.dtype.itemsize + 1) * ((k is not None) + (p is not None))
    one = pl.BlockSpec((rows, 1), lambda i: (i, 0))
    token, logprob = pl.pallas_call(
        functools.partial(kernel, V, k is not None, p is not None, 1 if interpret else unroll or UNROLL),
        grid=(pl.cdiv(N, rows),),
        in_specs=[pl.BlockSpec((rows, COLUMNS), lambda i: (i, 0)), pl.BlockSpec((rows, logits.shape[1]), lambda i: (i, 0))],
        out_specs=(one, one),
        out_shape=(jax.ShapeDtypeStruct((N, 1), jnp.int32), jax.ShapeDtypeStruct((N, 1), jnp.float32)),
        scratch_shapes=[pltpu.VMEM((rows, pl.cdiv(V, WIDTH) * WIDTH), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=vmem(rows, V, logits.dtype.itemsize) + SPARE
        ),
        cost_estimate=pl.CostEstimate(
            flops=3 * sweeps * N * V, transcendentals=N * V, bytes_accessed=N * V * logits.dtype.itemsize + 4 * (COLUMNS + 2) * N
        ),
        interpret=interpret,
    )(columns, logits)
    return token[:, 0], logprob[:, 0]


def supports(
    target: str, logits: Any, uniform: Any, k: Any, p: Any, min_p: Any, temperature: Any,
    *, rows: Optional[int] = None, unroll: Optional[int] = None,
) -> str | None:  # fmt: skip
    rows = rows or LEAST_ROWS
    widest = VMEM // vmem(rows, WIDTH, logits.itemsize) * WIDTH
    V = logits.shape[-1]
    return f"V = {V}: {rows} whole rows fit VMEM up to V = {widest}" if widest < V else None
