"""Scans along time in Triton: linear_recurrence, and with other factors cumsum, logcumsumexp and the gradients of all three.

A program walks over time with a tile of steps and channels. Inside a tile the steps are combined in a tree; the state goes
from tile to tile in registers, put into the first step, so that nothing is divided and no product of factors meets the state.
Where channels and sequences are too few to fill a GPU, time is cut into segments: a kernel finds what each makes of any state
(its ends), and every program of the second kernel starts from the ends before its own.

A tree multiplies factors that the recurrence never multiplies: they may overflow, or make a NaN of 0 and an infinity. Where a
tile's states are not all finite they are computed again, step by step.
"""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdk_kernels.rms_norm.triton_backward import processors

# Where the factors come from. LINEAR: a of the step. BEFORE: a of the step before, in the order of the walk.
# SUM: one. LOGSUM: exp of the largest x before minus the largest with the step. DECAY: exp of y minus y of the step before.
LINEAR, BEFORE, SUM, LOGSUM, DECAY = (tl.constexpr(i) for i in range(5))

COLUMNS, TILE, MOST_STEPS = 64, 4096, 512  # of a tile: channels, elements, steps
TUNABLE = {"steps": (16, 32, 64, 128, 256), "channels": (16, 32, 64)}  # of a tile
MOST_SEGMENTS, SEGMENT_TILES = 64, 4
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _affine(a1, b1, a2, b2):
    return a1 * a2, a2 * b1 + b2


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _finite(x):
    """An infinity becomes the largest number: the difference of two equal ones is 0."""
    return tl.minimum(tl.maximum(x, -LARGEST, tl.PropagateNan.ALL), LARGEST, tl.PropagateNan.ALL)


@triton.jit
def _read(x, steps, columns, T, D, x_t, x_d, other, REVERSE: tl.constexpr):
    t = T - 1 - steps if REVERSE else steps
    mask = (steps >= 0) & (steps < T) & (columns < D)
    return tl.load(x + t * x_t + columns * x_d, mask=mask, other=other).to(tl.float32)


@triton.jit
def _elements(a, b, steps, columns, T, D, a_t, a_d, b_t, b_d, largest, KIND: tl.constexpr, REVERSE: tl.constexpr):
    """Factors and terms of a tile, and the largest x up to each step. Past the end a state stays as it is, but at step T of
    BEFORE, where it takes the last factor."""
    top = largest
    if KIND == LOGSUM:
        term = _read(b, steps, columns, T, D, b_t, b_d, -float("inf"), REVERSE)
        before = _read(b, steps - 1, columns, T, D, b_t, b_d, -float("inf"), REVERSE)
        before = tl.maximum(tl.associative_scan(before, 0, _larger), largest)
        top = tl.maximum(before, term)
        factor = tl.exp(_finite(before) - _finite(top))
        term = tl.exp(term - _finite(top))
    else:
        term = _read(b, steps, columns, T, D, b_t, b_d, 0.0, REVERSE)
        if KIND == LINEAR:
            factor = _read(a, steps, columns, T, D, a_t, a_d, 1.0, REVERSE)
        elif KIND == BEFORE:
            factor = _read(a, steps - 1, columns, T, D, a_t, a_d, 1.0, REVERSE)
        elif KIND == DECAY:
            own = _finite(_read(a, steps, columns, T, D, a_t, a_d, 0.0, REVERSE))
            before = _finite(_read(a, steps - 1, columns, T, D, a_t, a_d, 0.0, REVERSE))
            factor = tl.where((steps > 0) & (steps < T), tl.exp(own - before), 1.0)
        else:
            factor = term
    return factor, term, top


@triton.jit
def _last(x, STEPS: tl.constexpr):
    row = tl.arange(0, STEPS)[:, None]
    return tl.sum(tl.where(row == STEPS - 1, x, 0.0), 0, keep_dims=True)


@triton.jit
def _all_finite(x):
    bad = tl.where(tl.abs(x) < float("inf"), 0, 1)
    return tl.max(tl.max(bad, 1), 0) == 0


@triton.jit
def _states(factor, term, state, KIND: tl.constexpr, STEPS: tl.constexpr):
    """The states of a tile, from the one before it."""
    row = tl.arange(0, STEPS)[:, None]
    if KIND == SUM:
        states = tl.associative_scan(tl.where(row == 0, state + term, term), 0, _add)
    else:
        _, states = tl.associative_scan((factor, tl.where(row == 0, factor * state + term, term)), 0, _affine)
        if KIND != LOGSUM and not _all_finite(states):  # LOGSUM's factors are at most 1, and 1 after an infinity
            for i in range(STEPS):
                here = row == i
                own = tl.sum(tl.where(here, factor, 0.0), 0, keep_dims=True)
                state = own * state + tl.sum(tl.where(here, term, 0.0), 0, keep_dims=True)
                states = tl.where(here, state, states)
    return states


@triton.jit
def _ends(
    a, b, ends, T, D, length, a_n, a_t, a_d, b_n, b_t, b_d,
    KIND: tl.constexpr, REVERSE: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of every segment the product of its factors (LOGSUM: the largest x), and the state it ends in from 0."""
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    n, segment = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    if KIND != SUM and KIND != LOGSUM:
        a += n * a_n
    b += n * b_n
    product = tl.full((1, COLUMNS), 1.0, tl.float32)
    largest = tl.full((1, COLUMNS), -float("inf"), tl.float32)
    state = tl.zeros((1, COLUMNS), tl.float32)
    for start in range(segment * length, (segment + 1) * length, STEPS):
        steps = start + tl.arange(0, STEPS)[:, None].to(tl.int64)
        factor, term, top = _elements(a, b, steps, columns, T, D, a_t, a_d, b_t, b_d, largest, KIND, REVERSE)
        state = _last(_states(factor, term, state, KIND, STEPS), STEPS)
        if KIND == LOGSUM:
            largest = _last(top, STEPS)
        elif KIND != SUM:
            product *= tl.reduce(factor, 0, _multiply, keep_dims=True)
    to = ends + ((n * tl.num_programs(2) + segment) * 2) * D + columns
    tl.store(to, largest if KIND == LOGSUM else product, mask=columns < D)
    tl.store(to + D, state, mask=columns < D)


@triton.jit
def _after(first, second, state, largest, KIND: tl.constexpr):
    """State and largest x behind a segment with these ends."""
    if KIND == LOGSUM:
        top = tl.maximum(largest, first)
        state = state * tl.exp(_finite(largest) - _finite(top)) + second * tl.exp(_finite(first) - _finite(top))
        largest = top
    elif KIND == SUM:
        state += second
    else:
        state = first * state + second
    return state, largest


@triton.jit
def _scan(
    a, b, h0, out, ends, x, dx, h, dh0, T, D, length,
    a_n, a_t, a_d, b_n, b_t, b_d, h0_n, h0_d, x_n, x_t, x_d, h_n, h_t, h_d,
    KIND: tl.constexpr, REVERSE: tl.constexpr, SEGMENTS: tl.constexpr, H0: tl.constexpr, OUT: tl.constexpr, DX: tl.constexpr,
    DH0: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """States into `out`, (N, T, D), contiguous. DX: a product with them into dx. DH0: the state after step T into dh0."""
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    n, segment = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    if KIND != SUM and KIND != LOGSUM:
        a += n * a_n
    b += n * b_n
    state = tl.zeros((1, COLUMNS), tl.float32)
    initial = state
    largest = tl.full((1, COLUMNS), -float("inf"), tl.float32)
    if H0:
        initial = tl.load(h0 + n * h0_n + columns * h0_d, mask=columns < D, other=0.0).to(tl.float32)
    if KIND == LINEAR:
        state = initial
    begin, end = segment * length, (segment + 1) * length
    if SEGMENTS > 1:
        fine, at, at_largest = True, state, largest
        for i in range(SEGMENTS):
            own = i == segment
            state, largest = tl.where(own, at, state), tl.where(own, at_largest, largest)
            first = tl.load(ends + ((n * SEGMENTS + i) * 2) * D + columns, mask=columns < D, other=0.0)
            second = tl.load(ends + ((n * SEGMENTS + i) * 2 + 1) * D + columns, mask=columns < D, other=0.0)
            if KIND != SUM and KIND != LOGSUM:
                fine = fine and _all_finite(first) and _all_finite(second) and _all_finite(at)
            at, at_largest = _after(first, second, at, at_largest, KIND)
        if not fine:  # the first segment's program takes all steps, one after the other
            begin, end = begin * 0, tl.where(segment == 0, SEGMENTS * length, 0).to(tl.int64)
            state = initial if KIND == LINEAR else tl.zeros((1, COLUMNS), tl.float32)
    for start in range(begin, end, STEPS):
        steps = start + tl.arange(0, STEPS)[:, None].to(tl.int64)
        factor, term, top = _elements(a, b, steps, columns, T, D, a_t, a_d, b_t, b_d, largest, KIND, REVERSE)
        states = _states(factor, term, state, KIND, STEPS)
        state = _last(states, STEPS)
        t = T - 1 - steps if REVERSE else steps
        mask, to = (steps < T) & (columns < D), n * T * D + t * D + columns
        if KIND == LOGSUM:
            states = top + tl.log(tl.maximum(states, 1.0, tl.PropagateNan.ALL))
            largest = _last(top, STEPS)
        if OUT:
            tl.store(out + to, states.to(out.dtype.element_ty), mask=mask)
        if DX:
            if KIND == DECAY:
                own = _read(x + n * x_n, steps, columns, T, D, x_t, x_d, 0.0, REVERSE)
                other = tl.exp(own - _finite(_read(a, steps, columns, T, D, a_t, a_d, 0.0, REVERSE)))
            else:  # what h was before the step: the next one of this walk, h0 behind its end
                other = _read(h + n * h_n, steps + 1, columns, T, D, h_t, h_d, 0.0, REVERSE)
                other = tl.where(steps == T - 1, initial, other)
            tl.store(dx + to, (states * other).to(dx.dtype.element_ty), mask=mask)
    if DH0 and end > begin and end >= T + 1:  # the program of the last steps
        tl.store(dh0 + n * D + columns, state.to(dh0.dtype.element_ty), mask=columns < D)


def scan(
    kind: tl.constexpr,
    a: Optional[Tensor],
    b: Tensor,
    h0: Optional[Tensor] = None,
    *,
    reverse: bool = False,
    out: Optional[Tensor] = None,
    x: Optional[Tensor] = None,
    h: Optional[Tensor] = None,
    dx: Optional[Tensor] = None,
    dh0: Optional[Tensor] = None,
    steps: Optional[int] = None,
    channels: Optional[int] = None,
) -> None:
    """Write the states of the recurrence that `kind` names, with terms b (..., T, D), into those of out, dx and dh0 that are given."""
    T, D = b.shape[-2:]
    b = b.reshape(-1, T, D)
    N = b.shape[0]
    a, x, h = (None if t is None else t.reshape(-1, T, D) for t in (a, x, h))
    h0 = None if h0 is None else h0.reshape(-1, D)
    walked = T + (dh0 is not None)
    columns = min(channels or COLUMNS, triton.next_power_of_2(D))
    steps = min(steps or max(TILE // columns, COLUMNS), MOST_STEPS, triton.next_power_of_2(walked))
    grid = triton.cdiv(D, columns), N
    segments = _segments(grid[0] * N, triton.cdiv(walked, steps), processors(b.device))
    length = triton.cdiv(walked, segments * steps) * steps
    segments = triton.cdiv(walked, length)
    strides = (*(a.stride() if a is not None else (0, 0, 0)), *b.stride())
    tile = {"KIND": kind, "REVERSE": reverse, "STEPS": steps, "COLUMNS": columns, "num_warps": 4}
    ends: Optional[Tensor] = None
    if segments > 1:
        ends = torch.empty((N, segments, 2, D), dtype=torch.float32, device=b.device)
        _ends[(*grid, segments)](a, b, ends, T, D, length, *strides, **tile)
    more = (*(h0.stride() if h0 is not None else (0, 0)), *(t for y in (x, h) for t in (y.stride() if y is not None else (0, 0, 0))))
    _scan[(*grid, segments)](
        a, b, h0, out, ends, x, dx, h, dh0, T, D, length, *strides, *more,
        SEGMENTS=segments, H0=h0 is not None, OUT=out is not None, DX=dx is not None, DH0=dh0 is not None, **tile,
    )  # fmt: skip


def _segments(programs: int, tiles: int, units: int) -> int:
    """Cutting time reads everything twice: only where less than one program per processor would run."""
    return 1 if programs >= units else max(1, min(4 * units // programs, tiles // SEGMENT_TILES, MOST_SEGMENTS))


def new_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def forward(
    a: Tensor, b: Tensor, h0: Optional[Tensor], reverse: bool, *, steps: Optional[int] = None, channels: Optional[int] = None
) -> Tensor:
    h = new_like(b)
    scan(LINEAR, a, b, h0, reverse=reverse, out=h, steps=steps, channels=channels)
    return h
