"""router_topk, backward, in NKI: 128 tokens at a time, one per partition; gradients are put to their experts one by one."""

from typing import Optional

import nki
import nki.isa as nisa
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run
from kdk_kernels.router_topk.nki import INF, ROWS, TINY, WIDEST, load_wide, tile_of, total_softmax


def load(source, start, rows):
    """Rows of (N, k) in float32."""
    given = tile_of(rows, source.shape[1], source.dtype)
    nisa.dma_copy(dst=given, src=source[start : start + rows])
    wide = tile_of(rows, source.shape[1])
    nisa.tensor_copy(dst=wide, src=given)
    return wide


def spread(grads, places, columns):
    """(rows, k) -> (rows, columns): gradients in their experts' columns, 0 elsewhere; and which columns have one."""
    rows, k = grads.shape
    number, chosen, g = tile_of(rows, columns), tile_of(rows, columns, nl.uint8), tile_of(rows, columns)
    nisa.iota(dst=number, pattern=[[1, columns]])
    nisa.memset(dst=chosen, value=0)
    nisa.memset(dst=g, value=0.0)
    for j in range(k):
        hit = tile_of(rows, columns, nl.uint8)
        nisa.tensor_scalar(dst=hit, data=number, op0=nl.equal, operand0=places[:, j : j + 1])
        nisa.tensor_tensor(dst=chosen, data1=chosen, data2=hit, op=nl.maximum, engine=nisa.engine.gpsimd)
        nisa.tensor_copy_predicated(dst=g, src=grads[:, j : j + 1].broadcast(1, columns), predicate=hit)
    return g, chosen


def only(x, chosen, otherwise):
    """A copy of x with a number where nothing was chosen."""
    kept = tile_of(x.shape[0], x.shape[1])
    nisa.memset(dst=kept, value=otherwise)
    nisa.tensor_copy_predicated(dst=kept, src=x, predicate=chosen)
    return kept


def centred(g, p):
    """g less its mean with the weights p; and the mean."""
    rows, columns = g.shape
    product, mean, h = tile_of(rows, columns), tile_of(rows, 1), tile_of(rows, columns)
    nisa.tensor_tensor(dst=product, data1=p, data2=g, op=nl.multiply)
    nisa.tensor_reduce(dst=mean, op=nl.add, data=product, axis=1)
    nisa.tensor_scalar(dst=h, data=g, op0=nl.subtract, operand0=mean)
    return h, mean


def softmax_gradient(x, g):
    rows, columns = x.shape
    p, top = tile_of(rows, columns), tile_of(rows, 1)
    inverse = total_softmax(x, top, p)
    nisa.tensor_scalar(dst=p, data=p, op0=nl.multiply, operand0=inverse)
    h = centred(centred(g, p)[0], p)[0]  # twice: the reference says why
    nisa.tensor_tensor(dst=h, data1=h, data2=p, op=nl.multiply)
    return h


def sigmoid_gradient(x, g, chosen, renormalize):
    rows, columns = x.shape
    s, slope = tile_of(rows, columns), tile_of(rows, columns)
    nisa.activation(dst=s, op=nl.sigmoid, data=x)
    nisa.activation(dst=slope, op=nl.sigmoid, data=x, scale=-1.0)
    if not renormalize:
        nisa.tensor_tensor(dst=s, data1=s, data2=slope, op=nl.multiply)
        nisa.tensor_tensor(dst=s, data1=s, data2=g, op=nl.multiply)
        return s
    r, total, inverse, rest = only(s, chosen, 0.0), tile_of(rows, 1), tile_of(rows, 1), tile_of(rows, 1)
    nisa.tensor_reduce(dst=total, op=nl.add, data=r, axis=1)
    nisa.tensor_scalar(dst=total, data=total, op0=nl.add, operand0=TINY)
    nisa.reciprocal(dst=inverse, data=total)
    nisa.tensor_scalar(dst=r, data=r, op0=nl.multiply, operand0=inverse)
    h, mean = centred(g, r)
    h = centred(h, r)[0]
    nisa.tensor_scalar(dst=rest, data=mean, op0=nl.multiply, operand0=inverse, op1=nl.multiply, operand1=TINY)
    nisa.scalar_tensor_tensor(dst=h, data=h, op0=nl.add, operand0=rest, op1=nl.multiply, operand1=r)
    nisa.tensor_tensor(dst=h, data1=h, data2=slope, op=nl.multiply)
    return h


@nki.jit
def router_topk_backward_kernel(grad, logits, indices, softmax, renormalize, scale):
    """grad (N, k), logits (N, E), indices (N, k) -> dlogits (N, E)."""
    N, E = logits.shape
    dlogits = nl.ndarray((N, E), dtype=logits.dtype, buffer=nl.shared_hbm)
    for start in range(0, N, ROWS):
        rows = min(ROWS, N - start)
        x = load_wide(logits, start, rows)
        g, chosen = spread(load(grad, start, rows), load(indices, start, rows), x.shape[1])
        if softmax and renormalize:
            found = softmax_gradient(only(x, chosen, -INF), g)
        elif softmax:
            found = softmax_gradient(x, g)
        else:
            found = sigmoid_gradient(x, g, chosen, renormalize)
        if renormalize or not softmax:
            found = only(found, chosen, 0.0)  # also where the row is NaN
        out = tile_of(rows, E, logits.dtype)
        nisa.tensor_scalar(dst=out, data=found[:, 0:E], op0=nl.multiply, operand0=scale)
        nisa.dma_copy(dst=dlogits[start : start + rows], src=out)
    return dlogits


def backward(
    grad_weights: Optional[Tensor], grad_indices: Optional[Tensor], logits: Tensor, indices: Tensor,
    scoring: str, renormalize: bool, scale: float, needs: str,
) -> Optional[Tensor]:  # fmt: skip
    if grad_weights is None:
        return None
    E, k = logits.shape[-1], indices.shape[-1]
    flat = grad_weights.reshape(-1, k), logits.reshape(-1, E), indices.reshape(-1, k)
    (dlogits,) = run(router_topk_backward_kernel, *flat, scoring == "softmax", renormalize, scale)
    return dlogits.reshape(logits.shape)


def supports(
    target: str, grad_weights: Optional[Tensor], grad_indices: Optional[Tensor], logits: Tensor, indices: Tensor,
    scoring: str, renormalize: bool, scale: float, needs: str,
) -> str | None:  # fmt: skip
    E = logits.shape[-1]
    return f"E = {E}: rows of experts fit SBUF up to E = {WIDEST}" if E > WIDEST else None
