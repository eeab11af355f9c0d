"""The algorithm of pallas.py on whole arrays, left to XLA: what of the kernel's gain is the algorithm's. `kdk bench` shows it beside."""

from typing import Optional

import jax
import jax.numpy as jnp

from kdk_kernels.router_topk.pallas import limits, ranking, take, weigh


def forward(
    logits: jax.Array, k: int, scoring: str, groups: Optional[int], top_groups: Optional[int],
    bias: Optional[jax.Array], renormalize: bool, scale: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    x, softmax = logits.reshape(-1, logits.shape[-1]).astype(jnp.float32).T, scoring == "softmax"
    column = None if bias is None else bias.astype(jnp.float32).reshape(-1, 1)
    key, who, top, total = ranking(x, column, softmax, *limits(groups, top_groups), renormalize)
    found, values = [], []
    for _ in range(k):
        best, first, hit, key, who = take(key, who)
        found.append(first)
        values.append(best if softmax and bias is None else jnp.sum(jnp.where(hit, x, 0.0), 0, keepdims=True))
    weights = weigh(jnp.concatenate(values, 0), top, total, softmax, renormalize) * scale
    shape = (*logits.shape[:-1], k)
    return weights.astype(logits.dtype).T.reshape(shape), jnp.concatenate(found, 0).astype(jnp.int32).T.reshape(shape)
