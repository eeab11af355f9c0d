"""router_topk, backward, in Pallas: tokens on the lanes, experts on the sublanes, as in the forward."""

import functools
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdk_kernels.router_topk.pallas import TUNABLE as TUNABLE
from kdk_kernels.router_topk.pallas import WIDEST, block_of, chunks, loop, too_many


def _gradient(x: Any, g: Any, chosen: Any, scoring: str, renormalize: bool) -> Any:
    """From columns of logits, gradients of the weights (0 where not chosen) and which were chosen."""
    if scoring == "softmax":
        shared = chosen if renormalize else jnp.ones_like(chosen)
        top = jnp.max(jnp.where(shared, x, -jnp.inf), 0, keepdims=True)
        # The root of the exponential: where a weight would be flushed to zero, its product with a gradient need not.
        root = jnp.where(shared, jnp.exp((x - top) * 0.5), 0.0)
        part = root / jnp.sum(root * root, 0, keepdims=True)
        h = g - jnp.sum(root * g * part, 0, keepdims=True)
        h = h - jnp.sum(root * h * part, 0, keepdims=True)  # twice: the reference says why
        return jnp.where(shared, h * root * part, 0.0)
    s, slope = jax.nn.sigmoid(x), jax.nn.sigmoid(-x)
    if not renormalize:
        return jnp.where(chosen, s * slope * g, 0.0)
    total = jnp.sum(jnp.where(chosen, s, 0.0), 0, keepdims=True) + 1e-20
    r = jnp.where(chosen, s / total, 0.0)
    mean = jnp.sum(r * g, 0, keepdims=True)
    h = g - mean
    found = r * slope * (h - jnp.sum(r * h, 0, keepdims=True) + mean * (1e-20 / total))
    return jnp.where(chosen, found, 0.0)


def _kernel(
    k: int, scoring: str, renormalize: bool, scale: float,
    grad: Any, logits: Any, indices: Any, dx: Any,
) -> None:  # fmt: skip
    for tokens in chunks(len(logits)):
        x = logits[tokens, :].astype(jnp.float32).T
        expert = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)

        def spread(j: Any, carry: Any, expert: Any = expert, tokens: slice = tokens) -> Any:
            g, chosen = carry
            hit = expert == indices[pl.ds(j, 1), tokens]
            return jnp.where(hit, grad[pl.ds(j, 1), tokens], g), jnp.where(hit, 1.0, chosen)

        g, chosen = loop(k, spread, (jnp.zeros_like(x), jnp.zeros_like(x)))
        found = _gradient(x, g, chosen > 0, scoring, renormalize) * scale
        dx[tokens, :] = found.T.astype(dx.dtype)


def backward(
    grad_weights: Optional[jax.Array], grad_indices: Optional[jax.Array], logits: jax.Array, indices: jax.Array,
    scoring: str, renormalize: bool, scale: float, needs: str,
    *, tokens: Optional[int] = None, interpret: Any = False,
) -> Optional[jax.Array]:  # fmt: skip
    if grad_weights is None:
        return None
    E, k = logits.shape[-1], indices.shape[-1]
    flat = logits.reshape(-1, E)
    N = flat.shape[0]
    block = block_of(N, E, k, tokens)
    rows, columns = pl.BlockSpec((block, E), lambda i: (i, 0)), pl.BlockSpec((k, block), lambda i: (0, i))
    dx = pl.pallas_call(
        functools.partial(_kernel, k, scoring, renormalize, scale),
        out_shape=jax.ShapeDtypeStruct((N, E), logits.dtype),
        grid=(pl.cdiv(N, block),),
        in_specs=[columns, rows, columns],
        out_specs=rows,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=(3 * k + 12) * N * E, transcendentals=N * E, bytes_accessed=2 * N * E * logits.dtype.itemsize + 8 * N * k
        ),
        interpret=interpret,
    )(grad_weights.reshape(N, k).astype(jnp.float32).T, flat, indices.reshape(N, k).T)
    return dx.reshape(logits.shape)


def supports(
    target: str, grad_weights: Any, grad_indices: Any, logits: Any, indices: Any,
    scoring: str, renormalize: bool, scale: float, needs: str, *, tokens: Optional[int] = None,
) -> str | None:  # fmt: skip
    E = logits.shape[-1]
    if E > WIDEST:
        return f"E = {E}: columns of experts fit VMEM up to E = {WIDEST}"
    return too_many(target, logits, indices.shape[-1], tokens, 2)
