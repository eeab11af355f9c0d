"""Scans along time in NKI: linear_recurrence, and with other factors cumsum, logcumsumexp and the gradients of all three.

Tensors lie in HBM with channels side by side; VectorE scans along the free dimension, step by step, with channels on the
partitions. So 128 steps of up to 512 channels arrive row by row, TensorE turns them, VectorE scans and TensorE turns the states
back. The state goes from tile to tile in SBUF. Rows are fetched in the order of the walk: against time, with a negative stride.
"""

from typing import Optional

import nki
import nki.isa as nisa
import nki.language as nl
import torch
from torch import Tensor

from kdk.backends.nki.launch import run

# Where the factors come from. LINEAR: a of the step. BEFORE: a of the step before, in the order of the walk.
# SUM: one. LOGSUM: exp of the largest x before minus the largest with the step. DECAY: exp of y minus y of the step before.
LINEAR, BEFORE, SUM, LOGSUM, DECAY = "linear", "before", "sum", "logsum", "decay"

STEPS, CHANNELS, WIDE = 128, 128, 512  # of a tile on the partitions either way; channels fetched at once
LARGEST = 3.4028234663852886e38
ENOUGH = 2.0**60  # a sum of at most as many terms, each at most 1, is in the domain of ScalarE's logarithm


def rows(x, n, first, count, start, width, reverse):
    """`count` rows of x (N, T, D) from step `first` of the walk on, as (count, width)."""
    T, D = x.shape[1], x.shape[2]
    if reverse:
        return x.ap([[-D, count], [1, width]], offset=(n * T + T - 1 - first) * D + start)
    return x[n, first : first + count, start : start + width]


def fetch(x, n, first, count, start, width, reverse, beyond):
    """A tile of rows in the order of the walk. Where that has no step, the rows hold `beyond`."""
    T = x.shape[1]
    tile = nl.ndarray((count, width), dtype=x.dtype, buffer=nl.sbuf)
    low, high = max(first, 0), min(first + count, T)
    if low > first or high < first + count:
        nisa.memset(dst=tile, value=beyond)
    if low < high:
        nisa.dma_copy(dst=tile[low - first : high - first], src=rows(x, n, low, high - low, start, width, reverse))
    return tile


def turned(tile, start, width):
    """Columns of a tile as rows, (width, P), in PSUM."""
    out = nl.ndarray((width, tile.shape[0]), dtype=tile.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=out, data=tile[:, start : start + width])
    return out


def in_sbuf(tile):
    """A tile of PSUM in float32 in SBUF: VectorE may read one operand from PSUM, not two."""
    out = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=out, src=tile, engine=nisa.engine.scalar)
    return out


def finite(x):
    """Infinities become the largest number: the difference of two equal ones is 0."""
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=out, data=x, op0=nl.maximum, operand0=-LARGEST, op1=nl.minimum, operand1=LARGEST)
    return out


def exp_of_difference(left, right):
    out = nl.ndarray(left.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=out, data1=left, data2=right, op=nl.subtract)
    nisa.activation(dst=out, op=nl.exp, data=out)
    return out


def filled(shape, value):
    out = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=out, value=value)
    return out


def recur(factor, term, state):
    """factor * state + term, step after step, all on (channels, steps)."""
    out = nl.ndarray(factor.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor_scan(dst=out, data0=factor, data1=term, initial=state, op0=nl.multiply, op1=nl.add)
    return out


def sums(term, state):
    """Sums of a tile, to which what came before is added: more exact than adding step after step."""
    own = recur(filled(term.shape, 1.0), term, 0.0)
    nisa.tensor_scalar(dst=own, data=own, op0=nl.add, operand0=state)
    return own


def two_at_a_time(y, term, state):
    """The states of factors exp(y_t - y_{t-1}), two steps at a time, by exp(y_t - y_{t-2}): a chain of half the roundings.

    y: (channels, steps + 2), with the last two steps before these. term: (channels, steps).
    """
    width, count = term.shape
    single = count % 2  # the first step stands alone
    out = nl.ndarray((width, count), dtype=nl.float32, buffer=nl.sbuf)
    factor = exp_of_difference(y[:, 2 : count + 2], y[:, 1 : count + 1])
    if single == 1:
        nisa.scalar_tensor_tensor(
            dst=out[:, 0:1], data=factor[:, 0:1], op0=nl.multiply, operand0=state, op1=nl.add, operand1=term[:, 0:1]
        )
        state = out[:, 0:1]
    if count > 1:
        pairs = count // 2
        first = term[:, single:count:2]
        ends = nl.ndarray((width, pairs + 1), dtype=nl.float32, buffer=nl.sbuf)  # behind the state before
        both = nl.ndarray((width, pairs), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=ends[:, 0:1], src=state)
        nisa.tensor_tensor(dst=both, data1=factor[:, single + 1 : count : 2], data2=first, op=nl.multiply)
        nisa.tensor_tensor(dst=both, data1=both, data2=term[:, single + 1 : count : 2], op=nl.add)
        over = exp_of_difference(y[:, single + 3 : count + 2 : 2], y[:, single + 1 : count : 2])
        nisa.tensor_tensor_scan(
            dst=ends[:, 1 : pairs + 1], data0=over, data1=both, initial=state, op0=nl.multiply, op1=nl.add
        )
        nisa.tensor_copy(dst=out[:, single + 1 : count : 2], src=ends[:, 1 : pairs + 1])
        begins = out[:, single:count:2]
        nisa.tensor_tensor(dst=begins, data1=factor[:, single:count:2], data2=ends[:, 0:pairs], op=nl.multiply)
        nisa.tensor_tensor(dst=begins, data1=begins, data2=first, op=nl.add)
    return out


def log_sums(x, state, largest):
    """Logarithms of the sums, the states behind, and the largest x of every step, with the one before in the first column."""
    width, count = x.shape
    top = nl.ndarray((width, count + 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=top[:, 0:1], src=largest)
    nisa.tensor_tensor_scan(dst=top[:, 1 : count + 1], data0=x, data1=x, initial=largest, op0=nl.maximum, op1=nl.maximum)
    base = finite(top)
    factor = exp_of_difference(base[:, 0:count], base[:, 1 : count + 1])
    own = recur(factor, exp_of_difference(x, base[:, 1 : count + 1]), 0.0)
    # What came before the tile is added to its own sums: small terms one by one would vanish in the sum of a million.
    states = nl.ndarray((width, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=states, op=nl.exp, data=base[:, 1 : count + 1], scale=-1.0, bias=base[:, 0:1])
    nisa.scalar_tensor_tensor(dst=states, data=states, op0=nl.multiply, operand0=state, op1=nl.add, operand1=own)
    out = nl.ndarray((width, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=out, data=states, op0=nl.maximum, operand0=1.0, op1=nl.minimum, operand1=ENOUGH)
    nisa.activation(dst=out, op=nl.log, data=out)
    nisa.tensor_tensor(dst=out, data1=out, data2=top[:, 1 : count + 1], op=nl.add)
    return out, states, top


@nki.jit
def scan_kernel(b, a, x, h, h0, kind, reverse, has_h0, to_out, to_dx, to_dh0):
    """b, a, x, h (N, T, D), h0 (N, D, 1) -> the states, a product with them, and the state after the last factor, as wanted."""
    N, T, D = b.shape
    results = []
    if to_out:
        out = nl.ndarray((N, T, D), dtype=b.dtype, buffer=nl.shared_hbm)
        results.append(out)
    if to_dx:
        dx = nl.ndarray((N, T, D), dtype=x.dtype if kind == DECAY else a.dtype, buffer=nl.shared_hbm)
        results.append(dx)
    if to_dh0:
        dh0 = nl.ndarray((N, D, 1), dtype=h0.dtype, buffer=nl.shared_hbm)
        results.append(dh0)
    walked = T + 1 if to_dh0 else T
    for n in range(N):
        for start in range(0, D, WIDE):
            wide = min(WIDE, D - start)
            blocks = (wide + CHANNELS - 1) // CHANNELS
            states, memory = [], []  # memory: the largest x so far, or the last two y
            for i in range(blocks):
                width = min(CHANNELS, wide - i * CHANNELS)
                if kind == LINEAR and has_h0:
                    raw = nl.ndarray((width, 1), dtype=h0.dtype, buffer=nl.sbuf)
                    at = start + i * CHANNELS
                    nisa.dma_copy(dst=raw, src=h0[n, at : at + width])
                    state = nl.ndarray((width, 1), dtype=nl.float32, buffer=nl.sbuf)
                    nisa.tensor_copy(dst=state, src=raw)
                    states.append(state)
                else:
                    states.append(filled((width, 1), 0.0))
                memory.append(filled((width, 2), LARGEST) if kind == DECAY else filled((width, 1), float("-inf")))
            for first in range(0, walked, STEPS):
                count = min(STEPS, walked - first)
                kept = min(count, T - first)  # without the step behind the end
                terms = fetch(b, n, first, count, start, wide, reverse, 0.0)
                if kind == LINEAR:
                    factors = fetch(a, n, first, count, start, wide, reverse, 1.0)
                elif kind == BEFORE:
                    factors = fetch(a, n, first - 1, count, start, wide, reverse, 1.0)
                elif kind == DECAY:
                    y = finite(fetch(a, n, first, count, start, wide, reverse, 0.0))
                found = nl.ndarray((count, wide), dtype=nl.float32, buffer=nl.sbuf)
                for i in range(blocks):
                    at, width = i * CHANNELS, min(CHANNELS, wide - i * CHANNELS)
                    term = turned(terms, at, width)
                    if kind == SUM:
                        own = sums(term, states[i])
                        last = own
                    elif kind == LOGSUM:
                        own, last, top = log_sums(in_sbuf(term), states[i], memory[i])
                        memory[i] = top[:, count : count + 1]
                    elif kind == DECAY:
                        known = nl.ndarray((width, count + 2), dtype=nl.float32, buffer=nl.sbuf)
                        nisa.tensor_copy(dst=known[:, 0:2], src=memory[i])
                        nisa.tensor_copy(dst=known[:, 2 : count + 2], src=turned(y, at, width), engine=nisa.engine.scalar)
                        own = two_at_a_time(known, term, states[i])
                        last = own
                        memory[i] = known[:, count : count + 2]
                    else:
                        own = recur(in_sbuf(turned(factors, at, width)), term, states[i])
                        last = own
                    states[i] = last[:, count - 1 : count]
                    nisa.tensor_copy(dst=found[:, at : at + width], src=turned(own, 0, count), engine=nisa.engine.scalar)
                if kept > 0:
                    if to_out:
                        put(out, found, n, first, kept, start, wide, reverse)
                    if to_dx:
                        if kind == DECAY:
                            values = fetch(x, n, first, count, start, wide, reverse, 0.0)
                            other = exp_of_difference(values, y)
                        else:  # what h was before the step: the next one of this walk, h0 behind its end
                            other = fetch(h, n, first + 1, count, start, wide, reverse, 0.0)
                            if has_h0 and first + count >= T:
                                stored = other
                                other = nl.ndarray((count, wide), dtype=nl.float32, buffer=nl.sbuf)
                                nisa.tensor_copy(dst=other, src=stored)
                                nisa.dma_copy(dst=other[kept - 1 : kept], src=h0[n, start : start + wide].reshape((1, wide)))
                        nisa.tensor_tensor(dst=found, data1=found, data2=other, op=nl.multiply)
                        put(dx, found, n, first, kept, start, wide, reverse)
            if to_dh0:
                for i in range(blocks):
                    at, width = start + i * CHANNELS, min(CHANNELS, wide - i * CHANNELS)
                    last = nl.ndarray((width, 1), dtype=dh0.dtype, buffer=nl.sbuf)
                    nisa.tensor_copy(dst=last, src=states[i])
                    nisa.dma_copy(dst=dh0[n, at : at + width], src=last)
    return tuple(results)


def put(out, found, n, first, kept, start, wide, reverse):
    """Rows of a tile, rounded, to where they belong."""
    rounded = nl.ndarray((kept, wide), dtype=out.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rounded, src=found[0:kept], engine=nisa.engine.gpsimd)
    nisa.dma_copy(dst=rows(out, n, first, kept, start, wide, reverse), src=rounded)


def scan(
    kind: str,
    b: Tensor,
    *,
    reverse: bool = False,
    a: Optional[Tensor] = None,
    x: Optional[Tensor] = None,
    h: Optional[Tensor] = None,
    h0: Optional[Tensor] = None,
    out: bool = False,
    dx: bool = False,
    dh0: bool = False,
) -> dict[str, Tensor]:
    """The recurrence that `kind` names, with terms b (..., T, D).

    Of the states ("out"), a product with them ("dx") and the state after the last factor ("dh0") those that are wanted.
    """
    shape, (T, D) = b.shape, b.shape[-2:]
    fold = D < CHANNELS and b.numel() > T * D  # few channels: those of all sequences side by side
    terms = _lines(b, fold)
    lines = [None if t is None else _lines(t, fold) for t in (a, x, h)]
    state = None if h0 is None else h0.reshape(terms.shape[0], terms.shape[2], 1)
    found = run(scan_kernel, terms, *lines, state, kind, reverse, h0 is not None, out, dx, dh0)
    names = [name for name, wanted in (("out", out), ("dx", dx), ("dh0", dh0)) if wanted]
    return {name: t.reshape(*shape[:-2], D) if name == "dh0" else _unfold(t, shape, fold) for name, t in zip(names, found, strict=True)}


def _lines(x: Tensor, fold: bool) -> Tensor:
    T, D = x.shape[-2:]
    x = x.reshape(-1, T, D)
    return x.transpose(0, 1).reshape(1, T, -1) if fold else x


def _unfold(x: Tensor, shape: torch.Size, fold: bool) -> Tensor:
    return (x.reshape(shape[-2], -1, shape[-1]).transpose(0, 1).contiguous() if fold else x).reshape(shape)


def forward(a: Tensor, b: Tensor, h0: Optional[Tensor], reverse: bool) -> Tensor:
    return scan(LINEAR, b, reverse=reverse, a=a, h0=h0, out=True)["out"]
