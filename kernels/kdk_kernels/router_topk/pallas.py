"""router_topk, forward, in Pallas: tokens on the lanes and experts on the sublanes, so that every round is plain vector maxima."""

import functools
from collections.abc import Callable
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdk.backends.pallas import SCOPED_VMEM

LANES = 128  # tokens that are worked on at once
MOST_CHUNKS = 8  # of a block of the grid
TUNABLE = {"tokens": (128, 256, 512, 1024, 2048)}  # of a block of the grid
WIDEST = 2048  # experts: a dozen arrays of them, one column per lane, in 16 MiB of VMEM
MOST_GROUPS = 64  # each is a piece of code
UNROLLED = 16  # rounds that are written out; more run in a loop
CODE = 16384  # experts times rounds times chunks that are written out: it compiles in seconds
MOST_CODE = 4 * CODE  # of a block whose tokens are given
COLUMNS = 12  # arrays (experts, LANES) in float32 that live at once
NOBODY = 1e9  # an index that stands for no expert: indices are float32, of which minima are cheaper than of integers

Round = Callable[[Any, Any], Any]


def loop(times: int, body: Round, carry: Any) -> Any:
    if times > UNROLLED:
        return jax.lax.fori_loop(0, times, body, carry)
    for j in range(times):
        carry = body(j, carry)
    return carry


def chunks(block: int) -> list[slice]:
    """The tokens of a block, as many at once as there are lanes. Written out: what one waits for, another can do."""
    return [slice(start, start + LANES) for start in range(0, block, LANES)]


def block_of(N: int, E: int, k: int, tokens: Optional[int]) -> int:
    """Tokens of a block: the given ones, or as much code as compiles in seconds. A loop's rows are at a place that the compiler does
    not know, which it takes in an array of one tile's width alone."""
    if tokens is not None:
        return min(tokens, pl.cdiv(N, LANES) * LANES)
    if k > UNROLLED:
        return LANES
    return LANES * min(max(CODE // (E * min(k, UNROLLED)), 1), MOST_CHUNKS, pl.cdiv(N, LANES))


def nan_first(x: Any) -> Any:
    return jnp.where(jnp.isnan(x), jnp.inf, x)


def take(key: Any, who: Any) -> tuple[Any, Any, Any, Any, Any]:
    """The largest key of every column, who has it (the first), where, and what is left: nobody, with -inf, in its place."""
    best = jnp.max(key, 0, keepdims=True)
    first = jnp.min(jnp.where(key == best, who, NOBODY), 0, keepdims=True)
    hit = who == first
    return best, first, hit, jnp.where(hit, -jnp.inf, key), jnp.where(hit, NOBODY, who)


def _counted(rows: int, columns: int) -> Any:
    return jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 0).astype(jnp.float32)


def _group_scores(scores: Any, groups: int) -> Any:
    """(E, tokens) -> (groups, tokens): the sums of the two largest."""
    size, found = len(scores) // groups, []
    who = _counted(size, scores.shape[1])
    for g in range(groups):
        members = scores[g * size : (g + 1) * size]
        first, _, _, rest, _ = take(members, who)
        found.append(first + jnp.max(rest, 0, keepdims=True))
    return nan_first(jnp.concatenate(found, 0))


def _within_groups(key: Any, who: Any, scores: Any, groups: int, top_groups: int) -> tuple[Any, Any]:
    """Keys and experts with those outside of the best groups taken out."""

    def best(_: Any, carry: Any) -> Any:
        left, names, chosen = carry
        _, _, hit, left, names = take(left, names)
        return left, names, jnp.where(hit, 1.0, chosen)

    size, tokens = len(key) // groups, key.shape[1]
    start = _group_scores(scores, groups), _counted(groups, tokens), jnp.zeros((groups, tokens), jnp.float32)
    chosen = loop(top_groups, best, start)[2]
    wide = [jnp.broadcast_to(chosen[g : g + 1], (size, tokens)) for g in range(groups)]
    inside = jnp.concatenate(wide, 0) > 0
    return jnp.where(inside, key, -jnp.inf), jnp.where(inside, who, NOBODY)


def ranking(x: Any, bias: Any, softmax: bool, groups: int, top_groups: int, renormalize: bool) -> tuple[Any, Any, Any, Any]:
    """Of logits (E, tokens): what the experts are ranked by, their numbers; the largest logit and the softmax's sum where it is needed."""
    key, who, scores, total = nan_first(x), _counted(*x.shape), x, 1.0
    top: Any = 0.0
    if softmax and (bias is not None or groups > 1 or not renormalize):
        top = jnp.max(x, 0, keepdims=True)
        total = jnp.sum(jnp.exp(x - top), 0, keepdims=True)
    if bias is not None or groups > 1:
        scores = jnp.exp(x - top) / total if softmax else jax.nn.sigmoid(x)
    if bias is not None:
        scores = scores + bias
        key = nan_first(scores)
    if groups > 1:
        key, who = _within_groups(key, who, nan_first(scores), groups, top_groups)
    return key, who, top, total


def weigh(chosen: Any, top: Any, total: Any, softmax: bool, renormalize: bool) -> Any:
    """The weights of chosen logits (k, tokens)."""
    if softmax and renormalize:
        w = jnp.exp(chosen - jnp.max(chosen, 0, keepdims=True))
        return w / jnp.sum(w, 0, keepdims=True)
    if softmax:
        return jnp.exp(chosen - top) / total
    w = jax.nn.sigmoid(chosen)
    return w / (jnp.sum(w, 0, keepdims=True) + 1e-20) if renormalize else w


def _kernel(
    k: int, softmax: bool, groups: int, top_groups: int, renormalize: bool, scale: float,
    logits: Any, *refs: Any,
) -> None:  # fmt: skip
    bias = refs[0] if len(refs) == 5 else None
    weights, indices, found, values = refs[-4:]

    for tokens in chunks(len(logits)):
        x = logits[tokens, :].astype(jnp.float32).T
        key, who, top, total = ranking(x, None if bias is None else bias[...], softmax, groups, top_groups, renormalize)

        def choose(j: Any, carry: Any, x: Any = x, tokens: slice = tokens) -> Any:
            best, first, hit, key, who = take(*carry)
            if bias is not None or not softmax:  # the key is not the logit, or hides that it is NaN, which no softmax forgives
                best = jnp.sum(jnp.where(hit, x, 0.0), 0, keepdims=True)
            found[pl.ds(j, 1), tokens], values[pl.ds(j, 1), tokens] = first, best
            return key, who

        loop(k, choose, (key, who))
        w = weigh(values[:, tokens], top, total, softmax, renormalize)
        weights[:, tokens] = (w * scale).astype(weights.dtype)
        indices[:, tokens] = found[:, tokens].astype(jnp.int32)


def limits(groups: Optional[int], top_groups: Optional[int]) -> tuple[int, int]:
    """The groups that limit the choice, and how many of them it may come from: all of the groups are no limit."""
    return (groups, top_groups) if groups is not None and top_groups is not None and top_groups != groups else (1, 1)


def forward(
    logits: jax.Array, k: int, scoring: str, groups: Optional[int], top_groups: Optional[int],
    bias: Optional[jax.Array], renormalize: bool, scale: float, *, tokens: Optional[int] = None, interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    E = logits.shape[-1]
    flat = logits.reshape(-1, E)
    N = flat.shape[0]
    block = block_of(N, E, k, tokens)
    padded = pl.cdiv(N, LANES) * LANES
    columns = pl.BlockSpec((k, block), lambda i: (0, i))
    more = [] if bias is None else [bias.astype(jnp.float32).reshape(E, 1)]
    weights, indices = pl.pallas_call(
        functools.partial(_kernel, k, scoring == "softmax", *limits(groups, top_groups), renormalize, scale),
        out_shape=(jax.ShapeDtypeStruct((k, padded), logits.dtype), jax.ShapeDtypeStruct((k, padded), jnp.int32)),
        grid=(pl.cdiv(N, block),),
        in_specs=[pl.BlockSpec((block, E), lambda i: (i, 0))] + [pl.BlockSpec((E, 1), lambda i: (0, 0)) for _ in more],
        out_specs=(columns, columns),
        scratch_shapes=[pltpu.VMEM((k, block), jnp.float32), pltpu.VMEM((k, block), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=7 * k * N * E, transcendentals=k * N, bytes_accessed=N * E * logits.dtype.itemsize + N * k * (4 + logits.dtype.itemsize)
        ),
        interpret=interpret,
    )(flat, *more)
    # XLA keeps so narrow an array column by column: turning it round moves nothing.
    shape = (*logits.shape[:-1], k)
    return weights[:, :N].T.reshape(shape), indices[:, :N].T.reshape(shape)


def too_many(target: str, logits: Any, k: int, tokens: Optional[int], blocks: int) -> str | None:
    """Why a block of the given tokens cannot be. blocks: of the logits' shape, each twice in VMEM, beside the columns of experts."""
    if tokens is None or tokens == LANES:
        return None
    E = logits.shape[-1]
    if k > UNROLLED:
        return f"tokens = {tokens}: more than {LANES} with k up to {UNROLLED}, not {k}"
    code = tokens // LANES * E * k
    if code > MOST_CODE:
        return f"tokens = {tokens}: E = {E} and k = {k} write out {code} experts, at most {MOST_CODE}"
    room = SCOPED_VMEM.get(target, min(SCOPED_VMEM.values())) - COLUMNS * E * LANES * 4
    fitting = room // (2 * blocks * logits.itemsize * max(E, LANES))
    return f"tokens = {tokens}: with E = {E} VMEM holds {fitting}" if fitting < tokens else None


def supports(
    target: str, logits: Any, k: int, scoring: str, groups: Optional[int], top_groups: Optional[int],
    bias: Any, renormalize: bool, scale: float, *, tokens: Optional[int] = None,
) -> str | None:  # fmt: skip
    E = logits.shape[-1]
    if E > WIDEST:
        return f"E = {E}: columns of experts fit VMEM up to E = {WIDEST}"
    if groups is not None and groups > MOST_GROUPS:
        return f"groups = {groups}: at most {MOST_GROUPS}, each is a piece of code"
    return too_many(target, logits, k, tokens, 1)
