"""The algorithm of pallas.py left to XLA, step by step: what of the kernel's gain is the algorithm's. `kdk bench` shows it beside."""

from typing import Optional

import jax
import jax.numpy as jnp

GROUP = 16  # steps of one turn of XLA's loop, as many as the kernel loads at once


def forward(a: jax.Array, b: jax.Array, h0: Optional[jax.Array], reverse: bool) -> jax.Array:
    def step(h: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h = now[0].astype(jnp.float32) * h + now[1].astype(jnp.float32)
        return h, h.astype(b.dtype)

    start = jnp.zeros((*b.shape[:-2], b.shape[-1]), jnp.float32) if h0 is None else h0.astype(jnp.float32)
    over_time = (jnp.moveaxis(a, -2, 0), jnp.moveaxis(b, -2, 0))
    _, states = jax.lax.scan(step, start, over_time, reverse=reverse, unroll=GROUP)
    return jnp.moveaxis(states, 0, -2)
