"""group_norm_silu, forward, in Pallas: channels on the sublanes, pixels on the lanes.

A block holds whole groups of channels, and all pixels where these fit: HBM is read once. Where they do not, it holds a part of them, and
each block of channels is walked over twice: in the first walk each channel's sum, and its squares about its own mean, go from block to
block in VMEM; at its end those of a group are put together, by Chan's formula as everywhere, and the second walk normalises.
"""

import functools
import math
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdk.backends.pallas import SCOPED_VMEM

SUBLANES, LANES = 16, 128  # a tile of 16 bits; a multiple for 32 bits too
ELEMENTS, MOST_PIXELS = 128 * 1024, 2048  # of a block
MOST_GROUPS = 32  # of a block: each is a piece of code
TUNABLE = {"elements": tuple(1 << power for power in (13, 17, 18, 19, 20, 21))}  # of a block, with no limit of its pixels


def sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def block_shape(C: int, P: int, groups: int, elements: Optional[int] = None) -> tuple[int, int]:
    """Channels and pixels of a block: whole groups and whole tiles, or everything."""
    in_group, most_pixels = C // groups, P if elements else MOST_PIXELS
    elements, channels = elements or ELEMENTS, math.lcm(in_group, SUBLANES)
    fitting = min(elements // (min(P, most_pixels) * channels), MOST_GROUPS * in_group // channels)
    channels = min(channels * max(fitting, 1), C)
    if elements // channels >= P <= most_pixels:
        return channels, P
    most = max(min(elements // channels, most_pixels) // LANES * LANES, LANES)
    parts = pl.cdiv(P, most)
    return channels, P if parts == 1 else pl.cdiv(pl.cdiv(P, parts), LANES) * LANES


def group_sums(values: jax.Array, in_group: int) -> jax.Array:
    """(channels, 1): of every channel the sum over its group."""
    channels = values.shape[0]
    if channels == in_group:
        return jnp.broadcast_to(jnp.sum(values, 0, keepdims=True), values.shape)
    row = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
    result = jnp.zeros_like(values)
    for first in range(0, channels, in_group):
        own = (row >= first) & (row < first + in_group)
        result = jnp.where(own, jnp.sum(jnp.where(own, values, 0.0), 0, keepdims=True), result)
    return result


def within(shape: tuple[int, ...], block: Any, P: int) -> Any:
    """Which elements of a block (channels, pixels) are pixels of the image; None: all."""
    pixels = shape[1]
    if P % pixels == 0:
        return None
    return jax.lax.broadcasted_iota(jnp.int32, shape, 1) + block * pixels < P


def of_groups(total: jax.Array, squares: jax.Array, in_group: int, P: int, eps: float) -> tuple[jax.Array, jax.Array]:
    """(mean, rstd) of every channel's group. total, squares (channels, 1): of a channel's P pixels, squares about its own mean."""
    size = float(in_group * P)
    centre = group_sums(total, in_group) / size
    off = total / P - centre
    return centre, jax.lax.rsqrt(group_sums(squares + P * off * off, in_group) / size + eps)


def activated(x: jax.Array, mean: jax.Array, rstd: jax.Array, weight: Any, bias: Any) -> jax.Array:
    z = (x.astype(jnp.float32) - mean) * (rstd * weight[...].astype(jnp.float32)) + bias[...].astype(jnp.float32)
    return z * sigmoid(z)


def _of_whole(in_group: int, P: int, eps: float, x: Any, weight: Any, bias: Any, y: Any, mean: Any, rstd: Any) -> None:
    """A block holds all pixels."""
    values = x[0].astype(jnp.float32)
    total = jnp.sum(values, 1, keepdims=True)
    centred = values - total / P
    mean[0], rstd[0] = of_groups(total, jnp.sum(centred * centred, 1, keepdims=True), in_group, P, eps)
    y[0] = activated(x[0], mean[0], rstd[0], weight, bias).astype(y.dtype)


def _of_parts(
    in_group: int, P: int, eps: float, x: Any, weight: Any, bias: Any, y: Any, mean: Any, rstd: Any, sums: Any, squares: Any
) -> None:
    block, blocks, pixels = pl.program_id(3), pl.num_programs(3), x.shape[2]

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        values = x[0].astype(jnp.float32)
        inside = within(values.shape, block, P)
        values = values if inside is None else jnp.where(inside, values, 0.0)
        before = (block * pixels).astype(jnp.float32)
        count = jnp.minimum(pixels, P - block * pixels).astype(jnp.float32)
        total = jnp.sum(values, 1, keepdims=True)
        own = total / count
        centred = values - own
        centred = centred if inside is None else jnp.where(inside, centred, 0.0)
        spread = jnp.sum(centred * centred, 1, keepdims=True)

        @pl.when(block == 0)
        def _() -> None:
            sums[...], squares[...] = total, spread

        @pl.when(block > 0)
        def _() -> None:
            off = own - sums[...] / before
            squares[...] += spread + off * off * (before * (count / (before + count)))
            sums[...] += total

        @pl.when(block == blocks - 1)
        def _() -> None:
            mean[0], rstd[0] = of_groups(sums[...], squares[...], in_group, P, eps)

    @pl.when(pl.program_id(2) == 1)
    def _() -> None:
        y[0] = activated(x[0], mean[0], rstd[0], weight, bias).astype(y.dtype)


def forward(
    x: jax.Array, groups: int, weight: jax.Array, bias: jax.Array, eps: float,
    *, elements: Optional[int] = None, interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    N, C, P = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    channels, pixels = block_shape(C, P, groups, elements)
    walks = 1 if pixels == P else 2
    tile = pl.BlockSpec((1, channels, pixels), lambda n, c, walk, k: (n, c, k))
    # Nothing is written in the first walk: the block stays where the second one starts.
    written = pl.BlockSpec((1, channels, pixels), lambda n, c, walk, k: (n, c, walk * k))
    of_channels = pl.BlockSpec((channels, 1), lambda n, c, walk, k: (c, 0))
    statistic = pl.BlockSpec((1, channels, 1), lambda n, c, walk, k: (n, c, 0))
    column = jax.ShapeDtypeStruct((N, C, 1), jnp.float32)
    y, mean, rstd = pl.pallas_call(
        functools.partial(_of_whole if walks == 1 else _of_parts, C // groups, P, eps),
        out_shape=(jax.ShapeDtypeStruct((N, C, P), x.dtype), column, column),
        grid=(N, pl.cdiv(C, channels), walks, pl.cdiv(P, pixels)),
        in_specs=[tile, of_channels, of_channels],
        out_specs=(written, statistic, statistic),
        scratch_shapes=[pltpu.VMEM((channels, 1), jnp.float32)] * (walks == 2) * 2,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=13 * N * C * P, transcendentals=N * C * P, bytes_accessed=(1 + walks) * N * C * P * x.dtype.itemsize
        ),
        name="group_norm_silu",
        interpret=interpret,
    )(x.reshape(N, C, P), weight.reshape(C, 1), bias.reshape(C, 1))
    first = slice(None, None, C // groups)  # all channels of a group have the same
    return y.reshape(x.shape), mean[:, first, 0], rstd[:, first, 0]


def too_wide(target: str, C: int, groups: int, bytes_per_element: int) -> str | None:
    """A block holds whole groups of channels, of LANES pixels at least."""
    channels = min(math.lcm(C // groups, SUBLANES), C)
    limit = SCOPED_VMEM.get(target, min(SCOPED_VMEM.values())) // (LANES * bytes_per_element)
    if channels <= limit:
        return None
    return f"{C // groups} channels of a group: blocks of whole groups and tiles are {channels}, up to {limit} fit"


def supports(
    target: str, x: Any, groups: int, weight: Any, bias: Any, eps: float, *, elements: Optional[int] = None
) -> str | None:
    """x and y stand in VMEM twice, the values three times in float32, and the columns of channels as wide as a block."""
    wide = too_wide(target, x.shape[1], groups, 4 * x.itemsize + 12 + 40)
    if wide or elements is None:
        return wide
    channels, pixels = block_shape(x.shape[1], math.prod(x.shape[2:]), groups, elements)
    limit = SCOPED_VMEM.get(target, min(SCOPED_VMEM.values())) // (4 * x.itemsize + 12)
    return None if channels * pixels <= limit else f"a block of {channels} channels and {pixels} pixels: up to {limit} elements fit"
