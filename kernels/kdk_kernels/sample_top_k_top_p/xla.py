"""The algorithm of pallas.py on whole arrays, left to XLA: what of the kernel's gain over a sort is the algorithm's. `kdk bench` shows
it beside."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kdk_kernels.sample_top_k_top_p.pallas import WIDTH, along, ordered_bits
from kdk_kernels.sample_top_k_top_p.reference import COLDEST


def _first_above(weights: Any, target: Any) -> tuple[Any, Any]:
    """The first column (N, 1) whose running sum exceeds the target, at most the last that weighs anything; the running sums."""
    running = jnp.cumsum(weights, 1)
    column = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    last = jnp.max(jnp.where(weights > 0.0, column, 0), 1, keepdims=True)
    return jnp.minimum(jnp.min(jnp.where(running > target, column, weights.shape[1]), 1, keepdims=True), last), running


def forward(
    logits: jax.Array, uniform: jax.Array, k: jax.Array | None, p: jax.Array | None, min_p: jax.Array | None, temperature: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    V = logits.shape[1]
    f = jnp.pad(logits.astype(jnp.float32), ((0, 0), (0, -V % WIDTH)), constant_values=-jnp.inf)
    degree = jnp.ones_like(f[:, :1]) if temperature is None else temperature.astype(jnp.float32)[:, None]
    most = jnp.max(f, 1, keepdims=True)
    weight = jnp.exp((f - most) / jnp.maximum(degree, COLDEST))
    everything = along(weight)
    shift, bits, number = ordered_bits(logits.dtype)

    def largest(measure: Callable[[Any], Any], wanted: Any, least: Any) -> Any:
        """The largest float from `least` to `most` at which the measure is what is wanted, or more."""
        low, high = bits(least), bits(most) + 1
        for _ in range(32 - shift):
            middle = (low & high) + ((low ^ high) >> 1)
            good = measure(number(middle)) >= wanted
            low, high = jnp.where(good, middle, low), jnp.where(good, high, middle)
        return number(low)

    least, total = jnp.full_like(most, -jnp.inf), everything
    if k is not None:
        wanted = jnp.where((k >= 1) & (k < V), k, V).astype(jnp.float32)[:, None]
        least = largest(lambda t: along(jnp.where(f >= t, 1.0, 0.0)), wanted, least)
        total = along(jnp.where(f >= least, weight, 0.0))
    if p is not None:
        share = p.astype(jnp.float32)[:, None]
        cut = largest(lambda t: along(jnp.where(f >= t, weight, 0.0)), jnp.maximum(share * total, COLDEST), least)
        least = jnp.where(share < 1.0, cut, least)
    kept = jnp.where((f >= least) & (weight >= (0.0 if min_p is None else min_p.astype(jnp.float32)[:, None])), weight, 0.0)
    groups = kept.reshape(len(f), -1, WIDTH)
    sums = jnp.sum(groups, 2)
    total = along(sums)
    target = jnp.where(degree > 0.0, uniform.astype(jnp.float32)[:, None], 0.0) * total
    group, _ = _first_above(sums, target)
    number_of = jax.lax.broadcasted_iota(jnp.int32, sums.shape, 1)
    left = target - along(jnp.where(number_of < group, sums, 0.0))
    mine = jnp.sum(jnp.where((number_of == group)[:, :, None], groups, 0.0), 1)
    place, _ = _first_above(mine, left)
    drawn = along(jnp.where(jax.lax.broadcasted_iota(jnp.int32, mine.shape, 1) == place, mine, 0.0))
    is_distribution = everything > 0.0
    token = jnp.where(is_distribution, group * WIDTH + place, -1)
    return token[:, 0], jnp.where(is_distribution, jnp.log(drawn) - jnp.log(total), jnp.nan)[:, 0]
