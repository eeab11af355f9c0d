"""The algorithm of pallas.py left to XLA, the vocabulary in a loop: what of the kernel's gain is the algorithm's. `kdk bench` shows it
beside."""

from typing import Optional

import jax
import jax.numpy as jnp

from kdk_kernels.linear_cross_entropy.pallas import dot

WIDTH = 4096  # columns of the vocabulary in a turn: the logits of 8192 rows by that many are read from HBM once more or less


def forward(
    x: jax.Array, weight: jax.Array, target: jax.Array, bias: Optional[jax.Array],
    ignore_index: int, label_smoothing: float, softcap: Optional[float], z_loss: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    V, H = weight.shape
    flat, label = x.reshape(-1, H), target.reshape(-1, 1)
    N, width = len(flat), min(V, WIDTH)

    def part(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, sums, hit, total = carry
        start = jnp.minimum(j * width, V - width)  # the last part begins earlier: of its columns those count that are new
        z = dot(flat, jax.lax.dynamic_slice_in_dim(weight, start, width), (1, 1))
        if bias is not None:
            z += jax.lax.dynamic_slice_in_dim(bias.astype(jnp.float32), start, width)
        if softcap is not None:
            z = jnp.tanh(z / softcap) * softcap
        column = start + jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
        new = column >= j * width
        top = jnp.maximum(largest, jnp.max(jnp.where(new, z, -jnp.inf), 1, keepdims=True))
        shift = jnp.where(top == -jnp.inf, 0.0, top)
        added = jnp.sum(jnp.where(new, jnp.exp(z - shift), 0.0), 1, keepdims=True)
        hit += jnp.sum(jnp.where(new & (column == label), z, 0.0), 1, keepdims=True)
        total += jnp.sum(jnp.where(new, z, 0.0), 1, keepdims=True)
        return top, sums * jnp.exp(largest - shift) + added, hit, total

    zero = jnp.zeros((N, 1), jnp.float32)
    largest, sums, hit, total = jax.lax.fori_loop(0, -(-V // width), part, (jnp.full((N, 1), -jnp.inf), zero, zero, zero))
    lse = jnp.where(largest == -jnp.inf, 0.0, largest) + jnp.log(sums)
    hit = jnp.where((label >= 0) & (label < V), hit, jnp.nan)
    loss = lse - (1 - label_smoothing) * hit
    if label_smoothing:
        loss -= label_smoothing / V * total
    loss = jnp.where(label == ignore_index, 0.0, loss + z_loss * lse * lse)
    return loss.reshape(target.shape), lse.reshape(target.shape)
