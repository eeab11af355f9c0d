"""linear_cross_entropy, forward, in NKI: a call takes some hundred rows and a part of the vocabulary, so that what is unrolled
stays small; the running maximum, sum, logit of the target and sum of the logits of every row go from call to call.

Rows lie on partitions; x and weight are turned on TensorE, once a call, so that the contraction lies on partitions.
"""

from typing import Optional

import nki
import nki.isa as nisa
import nki.language as nl
import torch
from torch import Tensor

from kdk.backends.nki.launch import run

ROWS = 128  # of a block: the partitions
PART = 4096  # columns of the vocabulary in a call
SBUF = {"trn2": 208 << 10, "trn3": 240 << 10}  # usable bytes per partition
BESIDE = 32 << 10  # bytes per partition for what does not grow with H
LOWEST = -3.4028235e38  # the least float32: in the place of -inf, where something is subtracted
EXACT = 1 << 24  # columns are counted in float32


def load_rows(source, start, count, turned):
    """Rows of an HBM tensor (?, H) in blocks of 128, and turned: blocks (at most 128 of H, count).

    At least two of those, of one size: a single chain of H sums would round a logit twice as coarsely.
    """
    H = source.shape[1]
    parts = max(2, (H + ROWS - 1) // ROWS)
    deep = (H + parts - 1) // parts
    blocks = []
    for k in range(0, H, deep):
        blocks.append(nl.ndarray((min(deep, H - k), count), dtype=source.dtype, buffer=nl.sbuf))
    raw = []
    for first in range(0, count, ROWS):
        rows = min(ROWS, count - first)
        tile = nl.ndarray((rows, H), dtype=source.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=source[start + first : start + first + rows])
        raw.append(tile)
        if turned:
            for k in range(len(blocks)):
                depth = blocks[k].shape[0]
                other = nl.ndarray((depth, rows), dtype=source.dtype, buffer=nl.psum)
                nisa.nc_transpose(dst=other, data=tile[:, k * deep : k * deep + depth])
                nisa.tensor_copy(dst=blocks[k][:, first : first + rows], src=other)
    return raw, blocks


def count_columns(width):
    """0, 1, 2 ... in every partition."""
    columns = nl.ndarray((ROWS, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=columns, pattern=[[1, width]])
    return columns


def load_bias(bias, start, width):
    """A part of bias (1, V), the same in every partition."""
    tile = nl.ndarray((ROWS, width), dtype=bias.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=bias.ap([[0, ROWS], [1, width]], offset=start))
    return tile


def load_labels(target, start, rows):
    raw = nl.ndarray((rows, 1), dtype=target.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=raw, src=target[start : start + rows])
    labels = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=labels, src=raw)
    return labels


def first_column(start: int, like: Tensor) -> Tensor:
    """Where a part of the vocabulary starts, as a tensor: as a constant, each part's kernel would be compiled by itself."""
    return torch.full((1, 1), start, dtype=torch.int32, device=like.device)


def load_start(start):
    """`first_column`, the same in every partition."""
    raw = nl.ndarray((ROWS, 1), dtype=start.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=raw, src=start.ap([[0, ROWS], [1, 1]]))
    origin = nl.ndarray((ROWS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=origin, src=raw)
    return origin


def place_from(labels, origin):
    """The labels, counted from a part's first column."""
    place = nl.ndarray(labels.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=place, data1=labels, data2=origin[0 : labels.shape[0]], op=nl.subtract)
    return place


def logits(left, right, first, rows, has_bias, bias, softcap):
    """Rows from `first` on of the product of two turned tensors, in PSUM or SBUF, and the tanh behind them if there is a softcap."""
    width = right[0].shape[1]
    z = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.psum)
    for k in range(len(left)):
        nisa.nc_matmul(dst=z, stationary=left[k][:, first : first + rows], moving=right[k], accumulate=k > 0)
    if has_bias:
        shifted = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=shifted, data1=z, data2=bias[0:rows], op=nl.add)
        z = shifted
    if softcap == 0.0:
        return z, z
    t = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=t, op=nl.tanh, data=z, scale=1.0 / softcap)
    capped = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=capped, data=t, op0=nl.multiply, operand0=softcap)
    return capped, t


def column(rows):
    return nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)


def add_tile(z, places, columns, begin, state, smoothed):
    """Take the logits of a part's columns from `begin` on into the state of their rows: maximum, sum, hit, total."""
    rows, width = z.shape
    top, sum, hit, total = state[:, 0:1], state[:, 1:2], state[:, 2:3], state[:, 3:4]
    largest, negated, factor, part = column(rows), column(rows), column(rows), column(rows)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=z, axis=1)
    nisa.tensor_tensor(dst=largest, data1=largest, data2=top, op=nl.maximum)
    nisa.tensor_scalar(dst=negated, data=largest, op0=nl.maximum, operand0=LOWEST, op1=nl.multiply, operand1=-1.0)
    exponentials = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=exponentials, op=nl.exp, data=z, bias=negated,
        reduce_op=nl.add, reduce_res=part, reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip
    nisa.activation(dst=factor, op=nl.exp, data=top, bias=negated)
    nisa.scalar_tensor_tensor(dst=sum, data=sum, op0=nl.multiply, operand0=factor, op1=nl.add, operand1=part)
    nisa.tensor_copy(dst=top, src=largest)
    place, here = column(rows), nl.ndarray((rows, width), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=place, data=places, op0=nl.subtract, operand0=float(begin))
    nisa.tensor_scalar(dst=here, data=columns[0:rows, 0:width], op0=nl.equal, operand0=place)
    chosen = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=chosen, value=0.0)
    nisa.tensor_copy_predicated(dst=chosen, src=z, predicate=here)  # no product: 0 times an infinite logit is NaN
    nisa.tensor_reduce(dst=part, op=nl.add, data=chosen, axis=1)
    nisa.tensor_tensor(dst=hit, data1=hit, data2=part, op=nl.add)
    if smoothed:
        nisa.tensor_reduce(dst=part, op=nl.add, data=z, axis=1)
        nisa.tensor_tensor(dst=total, data1=total, data2=part, op=nl.add)


def finish(state, labels, V, ignore_index, label_smoothing, z_loss):
    """loss and lse, (rows, 1), of rows whose state has seen the vocabulary."""
    rows = labels.shape[0]
    top, sum, hit, total = state[:, 0:1], state[:, 1:2], state[:, 2:3], state[:, 3:4]
    lse, loss, known, more = column(rows), column(rows), column(rows), column(rows)
    nisa.tensor_scalar(dst=lse, data=sum, op0=nl.maximum, operand0=2.0**-60)  # 0 where all logits are -inf: log ends at 2^-64
    nisa.activation(dst=lse, op=nl.log, data=lse)
    nisa.tensor_tensor(dst=lse, data1=lse, data2=top, op=nl.add)
    # A label outside of the vocabulary: -1 times a number beyond float32, minus itself, is NaN; 0 elsewhere.
    nisa.tensor_scalar(dst=known, data=labels, op0=nl.greater_equal, operand0=0.0)
    nisa.tensor_scalar(dst=more, data=labels, op0=nl.less, operand0=float(V))
    nisa.tensor_tensor(dst=known, data1=known, data2=more, op=nl.multiply)
    nisa.tensor_scalar(dst=known, data=known, op0=nl.subtract, operand0=1.0, op1=nl.multiply, operand1=3e38)
    nisa.tensor_scalar(dst=known, data=known, op0=nl.multiply, operand0=3e38)
    nisa.tensor_tensor(dst=known, data1=known, data2=known, op=nl.subtract)
    nisa.scalar_tensor_tensor(dst=loss, data=hit, op0=nl.multiply, operand0=label_smoothing - 1.0, op1=nl.add, operand1=lse)
    nisa.tensor_tensor(dst=loss, data1=loss, data2=known, op=nl.add)
    if label_smoothing != 0.0:
        nisa.scalar_tensor_tensor(dst=loss, data=total, op0=nl.multiply, operand0=-label_smoothing / V, op1=nl.add, operand1=loss)
    if z_loss != 0.0:
        nisa.scalar_tensor_tensor(dst=more, data=lse, op0=nl.multiply, operand0=z_loss, op1=nl.multiply, operand1=lse)
        nisa.tensor_tensor(dst=loss, data1=loss, data2=more, op=nl.add)
    ignored = nl.ndarray((rows, 1), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=ignored, data=labels, op0=nl.equal, operand0=float(ignore_index))
    nisa.tensor_copy_predicated(dst=loss, src=0.0, predicate=ignored)
    return loss, lse


@nki.jit
def loss_kernel(
    x, weight, target, has_bias, bias, started, before, start, tile, last, V, ignore_index, label_smoothing, softcap, z_loss
):  # fmt: skip
    """x (N, H), a part of the vocabulary from column start (1, 1) on: weight (P, H), bias (1, P); target (N, 1), before (N, 4).

    Returns the state (N, 4) or, after the last part, loss and lse (N, 1). softcap 0: none.
    """
    N, P = x.shape[0], weight.shape[0]
    _, left = load_rows(x, 0, N, True)
    columns, origin = count_columns(tile), load_start(start)
    states, labels, places = [], [], []
    for first in range(0, N, ROWS):
        rows = min(ROWS, N - first)
        state = nl.ndarray((rows, 4), dtype=nl.float32, buffer=nl.sbuf)
        if started:
            nisa.dma_copy(dst=state, src=before[first : first + rows])
        else:
            nisa.memset(dst=state, value=0.0)
            nisa.memset(dst=state[:, 0:1], value=LOWEST)
            nisa.tensor_scalar(dst=state[:, 0:1], data=state[:, 0:1], op0=nl.multiply, operand0=2.0)  # -inf
        states.append(state)
        labels.append(load_labels(target, first, rows))
        places.append(place_from(labels[-1], origin))
    for begin in range(0, P, tile):
        width = min(tile, P - begin)
        _, right = load_rows(weight, begin, width, True)
        shift = columns
        if has_bias:
            shift = load_bias(bias, begin, width)
        for i in range(len(states)):
            z, _ = logits(left, right, i * ROWS, states[i].shape[0], has_bias, shift, softcap)
            add_tile(z, places[i], columns, begin, states[i], label_smoothing != 0.0)
    if not last:
        after = nl.ndarray((N, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        for i in range(len(states)):
            nisa.dma_copy(dst=after[i * ROWS : i * ROWS + states[i].shape[0]], src=states[i])
        return after
    losses = nl.ndarray((N, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    sums = nl.ndarray((N, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    for i in range(len(states)):
        rows = states[i].shape[0]
        loss, lse = finish(states[i], labels[i], V, ignore_index, label_smoothing, z_loss)
        nisa.dma_copy(dst=losses[i * ROWS : i * ROWS + rows], src=loss)
        nisa.dma_copy(dst=sums[i * ROWS : i * ROWS + rows], src=lse)
    return losses, sums


def tile_size(target: str, H: int, itemsize: int) -> int:
    """Rows, and columns of the vocabulary, whose turned blocks stand in SBUF beside two blocks as they came; 0: none do."""
    room = SBUF.get(target, SBUF["trn2"]) - BESIDE
    return next((size for size in (512, 256, 128) if H * itemsize * (2 * size // ROWS + 2) <= room), 0)


def forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor],
    ignore_index: int,
    label_smoothing: float,
    softcap: Optional[float],
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    V, H = weight.shape
    flat, labels = x.reshape(-1, H), target.reshape(-1, 1)
    shift = None if bias is None else bias.reshape(1, V)
    size = tile_size("trn2", H, x.itemsize)
    losses, sums = [], []
    for first in range(0, flat.shape[0], size):
        rows, label = flat[first : first + size], labels[first : first + size]
        state: tuple[Tensor, ...] = ()
        for start in range(0, V, PART):
            end = min(start + PART, V)
            part = None if shift is None else shift[:, start:end]
            state = run(
                loss_kernel, rows, weight[start:end], label, bias is not None, part, bool(state), state[0] if state else None,
                first_column(start, x), size, end == V, V, ignore_index, label_smoothing, softcap or 0.0, z_loss,
            )  # fmt: skip
        losses.append(state[0])
        sums.append(state[1])
    return torch.cat(losses).reshape(target.shape), torch.cat(sums).reshape(target.shape)


def supports(
    target: str, x: Tensor, weight: Tensor, labels: Tensor, bias: Optional[Tensor],
    ignore_index: int, label_smoothing: float, softcap: Optional[float], z_loss: float,
) -> str | None:  # fmt: skip
    """Turned blocks of whole rows stand in SBUF, in either generation's."""
    V, H = weight.shape
    if V > EXACT:
        return f"V = {V}: columns are counted in float32, exact up to V = {EXACT}"
    widest = (SBUF["trn2"] - BESIDE) // (4 * x.itemsize)
    return f"H = {H}: blocks of {ROWS} rows fit SBUF up to H = {widest}" if widest < H else None
