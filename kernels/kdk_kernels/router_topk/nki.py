"""router_topk, forward, in NKI: 128 tokens at a time, one per partition; VectorE finds eight maxima and their places at once.

How VectorE treats NaN and the order of equal values is not documented for every generation: NaN is taken out before, and the
places of equal values come in ascending order as nc_find_index8 is documented. -inf ranks with the lowest finite number here,
as -inf marks what is taken.
"""

from typing import Optional

import nki
import nki.isa as nisa
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run

ROWS = 128
EIGHT = 8  # values that max8 finds; it wants at least as many
WIDEST = 4096  # experts: a dozen float32 tiles of them stand in SBUF
LOWEST = -3.4028234663852886e38
INF = float("inf")
TINY = 1e-20


def tile_of(rows, columns, dtype=nl.float32):
    return nl.ndarray((rows, columns), dtype=dtype, buffer=nl.sbuf)


def load_wide(source, start, rows):
    """Rows of (N, E) in float32, padded with -inf to eight columns."""
    E = source.shape[1]
    narrow = tile_of(rows, E, source.dtype)
    nisa.dma_copy(dst=narrow, src=source[start : start + rows])
    wide = tile_of(rows, max(E, EIGHT))
    if E < EIGHT:
        nisa.memset(dst=wide, value=-INF)
    nisa.tensor_copy(dst=wide[:, 0:E], src=narrow)
    return wide


def nan_first(x):
    """A copy with +inf in place of NaN."""
    rows, columns = x.shape
    number = tile_of(rows, columns, nl.uint8)
    nisa.tensor_tensor(dst=number, data1=x, data2=x, op=nl.equal)
    clean = tile_of(rows, columns)
    nisa.memset(dst=clean, value=INF)
    nisa.tensor_copy_predicated(dst=clean, src=x, predicate=number)
    return clean


def keys(x, real):
    """What the first `real` columns are ranked by: all above -inf, which the others have."""
    key = nan_first(x)
    nisa.tensor_scalar(dst=key[:, 0:real], data=key[:, 0:real], op0=nl.maximum, operand0=LOWEST)
    return key


def best(key, k):
    """Columns of the k largest of every row, in order, as uint32: (rows, k) and some more."""
    rows, columns = key.shape
    times = (k + EIGHT - 1) // EIGHT
    places = tile_of(rows, times * EIGHT, nl.uint32)
    for i in range(times):
        values = tile_of(rows, EIGHT)
        nisa.max8(dst=values, src=key)
        nisa.nc_find_index8(dst=places[:, i * EIGHT : (i + 1) * EIGHT], data=key, vals=values)
        if i + 1 < times:
            left = tile_of(rows, columns)
            nisa.nc_match_replace8(dst=left, data=key, vals=values, imm=-INF)
            key = left
    return places


def total_softmax(x, top, dst):
    """exp(x - the row's maximum) into dst; into top the negated maximum. Returns one over the sum."""
    rows = x.shape[0]
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=x, axis=1, negate=True)
    total, inverse = tile_of(rows, 1), tile_of(rows, 1)
    nisa.activation(dst=dst, op=nl.exp, data=x, bias=top, reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce)
    nisa.reciprocal(dst=inverse, data=total)
    return inverse


def within_best_groups(key, scores, E, groups, top_groups):
    """A copy of key with -inf outside of the best groups, by the sums of the two largest scores."""
    rows, size = key.shape[0], E // groups
    wide = max(size, EIGHT)
    padded = nl.ndarray((rows, groups, wide), dtype=nl.float32, buffer=nl.sbuf)
    if size < EIGHT:
        nisa.memset(dst=padded, value=-INF)
    nisa.tensor_copy(dst=padded[:, :, 0:size], src=scores[:, 0:E].reshape((rows, groups, size)))
    eights = nl.ndarray((rows, groups, EIGHT), dtype=nl.float32, buffer=nl.sbuf)
    for g in range(groups):
        nisa.max8(dst=eights[:, g : g + 1, :], src=padded[:, g : g + 1, :])
    sums = tile_of(rows, max(groups, EIGHT))
    nisa.memset(dst=sums, value=-INF)
    nisa.tensor_tensor(dst=sums[:, 0:groups], data1=eights[:, :, 0:1], data2=eights[:, :, 1:2], op=nl.add)
    places = best(keys(sums, groups), top_groups)
    place = tile_of(rows, top_groups)
    nisa.tensor_copy(dst=place, src=places[:, 0:top_groups])
    number, chosen = tile_of(rows, groups), tile_of(rows, groups, nl.uint8)
    nisa.iota(dst=number, pattern=[[1, groups]])
    nisa.memset(dst=chosen, value=0)
    for j in range(top_groups):
        nisa.scalar_tensor_tensor(dst=chosen, data=number, op0=nl.equal, operand0=place[:, j : j + 1], op1=nl.maximum, operand1=chosen)
    inside = tile_of(rows, key.shape[1], nl.uint8)
    nisa.memset(dst=inside, value=0)
    nisa.tensor_copy(dst=inside[:, 0:E].reshape((rows, groups, size)), src=chosen.expand_dim(2).broadcast(2, size))
    left = tile_of(rows, key.shape[1])
    nisa.memset(dst=left, value=-INF)
    nisa.tensor_copy_predicated(dst=left, src=key, predicate=inside)
    return left


@nki.jit
def router_topk_kernel(logits, k, softmax, groups, top_groups, renormalize, scale, bias=None):
    """logits (N, E), bias (1, E) -> weights (N, k), indices (N, k)."""
    N, E = logits.shape
    weights = nl.ndarray((N, k), dtype=logits.dtype, buffer=nl.shared_hbm)
    indices = nl.ndarray((N, k), dtype=nl.int32, buffer=nl.shared_hbm)
    if bias != None:  # noqa: E711 (the parser front end knows no `is`)
        given = tile_of(ROWS, E, bias.dtype)
        nisa.dma_copy(dst=given, src=bias.ap([[0, ROWS], [1, E]]))
        added = tile_of(ROWS, E)
        nisa.tensor_copy(dst=added, src=given)
    for start in range(0, N, ROWS):
        rows = min(ROWS, N - start)
        x = load_wide(logits, start, rows)
        scored = bias != None or groups > 1  # noqa: E711 (the parser front end knows no `is`)
        top, scores = tile_of(rows, 1), tile_of(rows, x.shape[1])
        if softmax and (scored or not renormalize):
            inverse = total_softmax(x, top, scores)
            nisa.tensor_scalar(dst=scores, data=scores, op0=nl.multiply, operand0=inverse)
        elif scored:
            nisa.activation(dst=scores, op=nl.sigmoid, data=x)
        if bias != None:  # noqa: E711 (the parser front end knows no `is`)
            nisa.tensor_tensor(dst=scores[:, 0:E], data1=scores[:, 0:E], data2=added[0:rows], op=nl.add)
            if E < EIGHT:
                nisa.memset(dst=scores[:, E:EIGHT], value=-INF)
            key = keys(scores, E)
        else:
            key = keys(x, E)
        if groups > 1:
            key = within_best_groups(key, nan_first(scores), E, groups, top_groups)
        places = best(key, k)
        chosen, w = tile_of(rows, k), tile_of(rows, k)
        nisa.nc_n_gather(dst=chosen, data=x, indices=places[:, 0:k])
        if softmax and renormalize:
            own_top = tile_of(rows, 1)
            inverse = total_softmax(chosen, own_top, w)
        elif softmax:
            nisa.activation(dst=w, op=nl.exp, data=chosen, bias=top)
        else:
            nisa.activation(dst=w, op=nl.sigmoid, data=chosen)
            if renormalize:
                total, inverse = tile_of(rows, 1), tile_of(rows, 1)
                nisa.tensor_reduce(dst=total, op=nl.add, data=w, axis=1)
                nisa.tensor_scalar(dst=total, data=total, op0=nl.add, operand0=TINY)
                nisa.reciprocal(dst=inverse, data=total)
        out = tile_of(rows, k, weights.dtype)
        if softmax or renormalize:
            nisa.tensor_scalar(dst=out, data=w, op0=nl.multiply, operand0=inverse, op1=nl.multiply, operand1=scale)
        else:
            nisa.tensor_scalar(dst=out, data=w, op0=nl.multiply, operand0=scale)
        whole = tile_of(rows, k, nl.int32)
        nisa.tensor_copy(dst=whole, src=places[:, 0:k])
        nisa.dma_copy(dst=weights[start : start + rows], src=out)
        nisa.dma_copy(dst=indices[start : start + rows], src=whole)
    return weights, indices


def forward(
    logits: Tensor, k: int, scoring: str, groups: Optional[int], top_groups: Optional[int],
    bias: Optional[Tensor], renormalize: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    E = logits.shape[-1]
    number = groups if groups is not None and top_groups != groups else 1  # all of the groups are no limit
    more = () if bias is None else (bias.reshape(1, E),)
    flat = logits.reshape(-1, E)
    weights, indices = run(router_topk_kernel, flat, k, scoring == "softmax", number, top_groups or 1, renormalize, scale, *more)
    shape = (*logits.shape[:-1], k)
    return weights.reshape(shape), indices.reshape(shape)


def supports(
    target: str, logits: Tensor, k: int, scoring: str, groups: Optional[int], top_groups: Optional[int],
    bias: Optional[Tensor], renormalize: bool, scale: float,
) -> str | None:  # fmt: skip
    E = logits.shape[-1]
    return f"E = {E}: rows of experts fit SBUF up to E = {WIDEST}" if E > WIDEST else None
