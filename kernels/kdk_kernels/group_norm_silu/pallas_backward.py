"""group_norm_silu, backward, in Pallas: blocks as in the forward, walked over twice: for the sums, then for dx.

The sums of a channel are at once an image's shares of dweight and dbias. Without dx there is no second walk.
"""

import functools
import math
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdk_kernels.group_norm_silu.pallas import block_shape, group_sums, sigmoid, too_wide, within


def _kernel(
    in_group: int, P: int, grad: Any, x: Any, weight: Any, bias: Any, mean: Any, rstd: Any, of_weight: Any, of_bias: Any, *refs: Any
) -> None:
    """refs, with dx: dx, then scratch for the two means over a group."""
    block, blocks = pl.program_id(3), pl.num_programs(3)
    w, scale = weight[...].astype(jnp.float32), rstd[0]
    n = (x[0].astype(jnp.float32) - mean[0]) * scale
    z = n * w + bias[...].astype(jnp.float32)
    # sigmoid(-z) and not 1 - sigmoid(z): the difference loses the small values that z multiplies.
    dz = grad[0].astype(jnp.float32) * (sigmoid(z) * (1.0 + z * sigmoid(-z)))

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        inside = within(dz.shape, block, P)
        parts = [t if inside is None else jnp.where(inside, t, 0.0) for t in (dz * n, dz)]

        @pl.when(block == 0)
        def _() -> None:
            of_weight[...] = jnp.zeros_like(of_weight)
            of_bias[...] = jnp.zeros_like(of_bias)

        of_weight[0] += jnp.sum(parts[0], 1, keepdims=True)
        of_bias[0] += jnp.sum(parts[1], 1, keepdims=True)
        if refs:
            _, means_gn, means_g = refs

            @pl.when(block == blocks - 1)
            def _() -> None:
                means_gn[...] = group_sums(w * of_weight[0], in_group) / float(in_group * P)
                means_g[...] = group_sums(w * of_bias[0], in_group) / float(in_group * P)

    if refs:
        dx, means_gn, means_g = refs

        @pl.when(pl.program_id(2) == 1)
        def _() -> None:
            # A single element is its own mean; contracted, dz * w would leave its rounding, times rstd.
            g = jnp.zeros_like(dz) if in_group * P == 1 else dz * w - means_g[...] - n * means_gn[...]
            dx[0] = (g * scale).astype(dx.dtype)


def backward(
    grad: jax.Array, x: jax.Array, weight: jax.Array, bias: jax.Array, mean: jax.Array, rstd: jax.Array, needs: str,
    *, interpret: Any = False,
) -> tuple[Optional[jax.Array], Optional[jax.Array], Optional[jax.Array]]:  # fmt: skip
    needed = needs.split(",")
    groups = mean.shape[1]
    N, C, P = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    channels, pixels = block_shape(C, P, groups)
    tile = pl.BlockSpec((1, channels, pixels), lambda n, c, walk, k: (n, c, k))
    of_channels = pl.BlockSpec((channels, 1), lambda n, c, walk, k: (c, 0))
    statistic = pl.BlockSpec((1, channels, 1), lambda n, c, walk, k: (n, c, 0))
    column = jax.ShapeDtypeStruct((N, C, 1), jnp.float32)
    out_shape, out_specs, scratch = [column, column], [statistic, statistic], []
    if "x" in needed:
        out_shape.append(jax.ShapeDtypeStruct((N, C, P), x.dtype))
        # Nothing is written in the first walk: the block stays where the second one starts.
        out_specs.append(pl.BlockSpec((1, channels, pixels), lambda n, c, walk, k: (n, c, walk * k)))
        scratch = [pltpu.VMEM((channels, 1), jnp.float32), pltpu.VMEM((channels, 1), jnp.float32)]
    walks = 2 if "x" in needed else 1
    per_channel = [jnp.repeat(t, C // groups, axis=1).reshape(N, C, 1) for t in (mean, rstd)]
    of_weight, of_bias, *dx = pl.pallas_call(
        functools.partial(_kernel, C // groups, P),
        out_shape=out_shape,
        grid=(N, pl.cdiv(C, channels), walks, pl.cdiv(P, pixels)),
        in_specs=[tile, tile, of_channels, of_channels, statistic, statistic],
        out_specs=out_specs,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=16 * walks * N * C * P,
            transcendentals=2 * walks * N * C * P,
            bytes_accessed=(2 * (walks if pixels < P else 1) + walks - 1) * N * C * P * x.dtype.itemsize,
        ),
        name="group_norm_silu_backward",
        interpret=interpret,
    )(grad.reshape(N, C, P), x.reshape(N, C, P), weight.reshape(C, 1), bias.reshape(C, 1), *per_channel)
    return (
        dx[0].reshape(x.shape) if dx else None,
        of_weight.sum((0, 2)).astype(weight.dtype) if "weight" in needed else None,
        of_bias.sum((0, 2)).astype(bias.dtype) if "bias" in needed else None,
    )


def supports(target: str, grad: Any, x: Any, weight: Any, bias: Any, mean: Any, rstd: Any, needs: str) -> str | None:
    """grad, x and dx stand in VMEM twice, five float32 arrays of values once, and the columns of channels as wide as a block."""
    return too_wide(target, x.shape[1], mean.shape[1], 6 * x.itemsize + 20 + 60)
