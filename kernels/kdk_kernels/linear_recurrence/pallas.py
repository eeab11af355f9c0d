"""Scans along time for TPUs: linear_recurrence, and with other factors cumsum, logcumsumexp and the gradients of all three.

Time lies on the sublanes and channels on the lanes. The grid walks over time, in either direction, with blocks of steps and
channels; the state goes from block to block in VMEM and from step to step in registers, so that HBM sees every tensor once.
The steps are taken one by one: a tree over the sublanes would be shorter, but its products of factors may overflow, or make a
NaN of 0 and an infinity, where the recurrence does not; and the bandwidth of HBM is the limit either way. Sums and running
maxima, which have no products, are trees.
"""

import functools
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdk.backends.pallas import SCOPED_VMEM

# Where the factors come from. LINEAR: a of the step. BEFORE: a of the step before, in the order of the walk.
# SUM: one. LOGSUM: exp of the largest x before minus the largest with the step. DECAY: exp of y minus y of the step before.
LINEAR, BEFORE, SUM, LOGSUM, DECAY = "linear", "before", "sum", "logsum", "decay"

SUBLANES, GROUP = 8, 16  # rows of a float32 tile; steps loaded at once, a tile of bfloat16
MOST_STEPS, MOST_CHANNELS, LANES = 512, 512, 128  # of a block
TUNABLE = {"steps": (64, 128, 256, 512, 1024, 2048), "channels": (128, 256, 512, 1024)}  # of a block
LARGEST = float(jnp.finfo(jnp.float32).max)


def _finite(x: jax.Array) -> jax.Array:
    """An infinity becomes the largest number: the difference of two equal ones is 0."""
    return jnp.clip(x, -LARGEST, LARGEST)


def _earlier(x: jax.Array, first: jax.Array, by: int, reverse: bool) -> jax.Array:
    """x `by` rows earlier in the walk; `first` in the rows that have nothing there."""
    rows = x.shape[0]
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    if reverse:
        return jnp.where(row >= rows - by, first, pltpu.roll(x, rows - by, 0))
    return jnp.where(row < by, first, pltpu.roll(x, by, 0))


def _tree(x: jax.Array, state: jax.Array, identity: float, reverse: bool, combine: Any) -> jax.Array:
    by = 1
    while by < x.shape[0]:
        x = combine(x, _earlier(x, jnp.full_like(x, identity), by, reverse))
        by *= 2
    return combine(x, state)


def _last(x: jax.Array, reverse: bool) -> jax.Array:
    """The last row in the order of the walk, in a row of its own."""
    return x[:1] if reverse else x[-1:]


def _one_by_one(a: jax.Array, b: jax.Array, state: jax.Array, before: bool, reverse: bool) -> tuple[jax.Array, jax.Array]:
    """The states of a group, and the last one (before: times the last factor). state: (1, D)."""
    out = []
    for start in range(0, a.shape[0], SUBLANES):
        start = a.shape[0] - SUBLANES - start if reverse else start
        tile = b[start : start + SUBLANES]
        row = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0)
        for i in range(SUBLANES):
            i = SUBLANES - 1 - i if reverse else i
            factor, term = a[start + i : start + i + 1], b[start + i : start + i + 1]
            h = state + term if before else factor * state + term
            state = factor * h if before else h
            tile = jnp.where(row == i, h, tile)
        out.append(tile)
    return jnp.concatenate(out[::-1] if reverse else out, 0), state


def _kernel(names: tuple[str, ...], kind: str, reverse: bool, T: int, blocks: int, ragged: bool, *refs: Any) -> None:
    """names: of the references, inputs, outputs, then scratch. state, memory: scratch, what goes from block to block."""
    ref = dict(zip(names, refs))
    steps = ref["b"].shape[1]
    walked = pl.program_id(2)
    block = blocks - 1 - walked if reverse else walked
    channels, groups = ref["b"].shape[2], steps // GROUP
    start = ref["h0"][0].astype(jnp.float32) if "h0" in ref else jnp.zeros((1, channels), jnp.float32)

    @pl.when(walked == 0)
    def _() -> None:
        ref["state"][...] = start if kind == LINEAR else jnp.zeros_like(start)
        if "memory" in ref:
            ref["memory"][...] = jnp.full((1, channels), -jnp.inf if kind == LOGSUM else LARGEST, jnp.float32)

    def rows_of(name: str, g: Any) -> jax.Array:
        return ref[name][0, pl.ds(pl.multiple_of(g * GROUP, GROUP), GROUP), :].astype(jnp.float32)

    beside = ref["edge"][0].astype(jnp.float32) if "h" in ref else None

    def group(i: Any, carried: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """h: of this group, loaded by the one before, which needed a row of it."""
        state, memory, *h = carried
        g = groups - 1 - i if reverse else i
        here = pl.ds(pl.multiple_of(g * GROUP, GROUP), GROUP)
        t = jax.lax.broadcasted_iota(jnp.int32, (GROUP, channels), 0) + block * steps + g * GROUP

        def read(name: str, beyond: float) -> jax.Array:
            values = rows_of(name, g)
            return jnp.where(t < T, values, beyond) if ragged else values

        def write(name: str, values: jax.Array) -> None:
            ref[name][0, here, :] = values.astype(ref[name].dtype)

        if kind == SUM:
            states = _tree(read("b", 0.0), state, 0.0, reverse, jnp.add)
            state = _last(states, reverse)
        elif kind == LOGSUM:
            x = read("b", -jnp.inf)
            top = _tree(x, memory, -jnp.inf, reverse, jnp.maximum)
            top_before = _earlier(top, memory, 1, reverse)
            sums, state = _one_by_one(jnp.exp(_finite(top_before) - _finite(top)), jnp.exp(x - _finite(top)), state, False, reverse)
            sums += carried_in * jnp.exp(_finite(remembered) - _finite(top))
            states, memory = top + jnp.log(jnp.maximum(sums, 1.0)), _last(top, reverse)
        elif kind == DECAY:
            y = _finite(read("a", LARGEST))
            factor = jnp.exp(y - _earlier(y, memory, 1, reverse))
            states, state = _one_by_one(factor, read("b", 0.0), state, False, reverse)
            write("dx", states * jnp.exp(read("x", 0.0) - y))
            memory = _last(y, reverse)
        else:
            states, state = _one_by_one(read("a", 1.0), read("b", 0.0), state, kind == BEFORE, reverse)
        if "out" in ref:
            write("out", states)
        if "h" in ref:  # the state before a step is, against time, the next row of the walk: in the next group, beside the block, h0
            following = rows_of("h", jnp.clip(g - 1 if reverse else g + 1, 0, groups - 1))
            near = _last(jnp.where(i == groups - 1, beside, following), not reverse)
            before = _earlier(h[0], near, 1, not reverse)
            write("dx", states * jnp.where(t == (0 if reverse else T - 1), start, before))
            h = [following]
        return state, memory, *h

    # LOGSUM adds what came before a block to the block's own sums: small terms one by one would vanish in the sum of a million.
    carried_in, remembered = ref["state"][...], ref["memory"][...] if "memory" in ref else ref["state"][...]
    first = [rows_of("h", groups - 1 if reverse else 0)] if "h" in ref else []
    begin = jnp.zeros_like(carried_in) if kind == LOGSUM else carried_in
    state, memory, *_ = jax.lax.fori_loop(0, groups, group, (begin, remembered, *first))
    ref["state"][...] = state + carried_in * jnp.exp(_finite(remembered) - _finite(memory)) if kind == LOGSUM else state
    if "memory" in ref:
        ref["memory"][...] = memory
    if "dh0" in ref:

        @pl.when(walked == blocks - 1)
        def _() -> None:
            ref["dh0"][0] = ref["state"][...].astype(ref["dh0"].dtype)


def too_large(target: str, b: Any, operands: int, steps: Optional[int], channels: Optional[int]) -> str | None:
    """Why blocks of given steps and channels do not fit VMEM: as many operands as have the shape of `b` stand there twice, and may take
    three quarters of it. Few channels are counted as if those of all sequences stood side by side."""
    if steps is None and channels is None:
        return None
    T = b.shape[-2]
    tall, wide = block_shape(T, b.numel() // T, steps, channels)
    most = SCOPED_VMEM.get(target, min(SCOPED_VMEM.values())) * 3 // 4 // (2 * operands * b.itemsize)
    return f"blocks of {tall} steps and {wide} channels: up to {most} elements fit VMEM" if tall * wide > most else None


def block_shape(T: int, D: int, steps: Optional[int], channels: Optional[int]) -> tuple[int, int]:
    """Steps and channels of a block."""
    return min(steps or MOST_STEPS, pl.cdiv(T, GROUP) * GROUP), min(D, channels or MOST_CHANNELS)


def scan(
    kind: str,
    b: jax.Array,
    outputs: dict[str, Any],
    *,
    reverse: bool = False,
    a: Optional[jax.Array] = None,
    h0: Optional[jax.Array] = None,
    x: Optional[jax.Array] = None,
    h: Optional[jax.Array] = None,
    steps: Optional[int] = None,
    channels: Optional[int] = None,
    interpret: Any = False,
) -> dict[str, jax.Array]:
    """The recurrence that `kind` names, with terms b (..., T, D).

    outputs: name -> dtype, of the states ("out"), a product with them ("dx") and the state after the last factor ("dh0").
    """
    shape = b.shape
    T, D = shape[-2:]
    inputs = {"a": a, "b": b, "x": x, "h": h}
    fold = D < LANES and b.size > T * D  # few channels: those of all sequences side by side
    wide = {name: _lines(t, fold) for name, t in inputs.items() if t is not None}
    N, _, columns = wide["b"].shape
    if h0 is not None:
        wide["h0"] = h0.reshape(N, 1, columns)
    steps, width = block_shape(T, columns, steps, channels)
    blocks = pl.cdiv(T, steps)

    def at(k: Any) -> Any:
        return blocks - 1 - k if reverse else k

    tile = pl.BlockSpec((1, steps, width), lambda n, d, k: (n, at(k), d))
    row = pl.BlockSpec((1, 1, width), lambda n, d, k: (n, 0, d))
    specs = {name: row if name == "h0" else tile for name in wide}
    if h is not None:  # the rows of h beside the block, on the side that the walk comes to next
        wide["edge"] = wide["h"]
        per, last = steps // GROUP, pl.cdiv(T, GROUP) - 1
        specs["edge"] = pl.BlockSpec((1, GROUP, width), lambda n, d, k: (n, jnp.clip(at(k) * per + (-1 if reverse else per), 0, last), d))
    scratch = {"state": pltpu.VMEM((1, width), jnp.float32)}
    if kind in (LOGSUM, DECAY):
        scratch["memory"] = pltpu.VMEM((1, width), jnp.float32)
    results = [jax.ShapeDtypeStruct((N, 1 if name == "dh0" else T, columns), dtype) for name, dtype in outputs.items()]
    names = (*wide, *outputs, *scratch)
    moved = sum(t.size * t.dtype.itemsize for t in (*wide.values(), *results))
    out = pl.pallas_call(
        functools.partial(_kernel, names, kind, reverse, T, blocks, T % steps != 0 and (reverse or "dh0" in outputs)),
        grid=(N, pl.cdiv(columns, width), blocks),
        in_specs=list(specs.values()),
        out_specs=[row if name == "dh0" else tile for name in outputs],
        out_shape=results,
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=3 * b.size, transcendentals=2 * b.size if kind in (LOGSUM, DECAY) else 0, bytes_accessed=moved),
        name=f"scan_{kind}",
        interpret=interpret,
    )(*wide.values())
    state = (*shape[:-2], D)
    return {name: t.reshape(state) if name == "dh0" else _unfold(t, shape, fold) for (name, _), t in zip(outputs.items(), out)}


def _lines(x: jax.Array, fold: bool) -> jax.Array:
    T, D = x.shape[-2:]
    x = x.reshape(-1, T, D)
    return x.swapaxes(0, 1).reshape(1, T, -1) if fold else x


def _unfold(x: jax.Array, shape: tuple[int, ...], fold: bool) -> jax.Array:
    return (x.reshape(shape[-2], -1, shape[-1]).swapaxes(0, 1) if fold else x).reshape(shape)


def forward(
    a: jax.Array, b: jax.Array, h0: Optional[jax.Array], reverse: bool,
    *, steps: Optional[int] = None, channels: Optional[int] = None, interpret: Any = False,
) -> jax.Array:  # fmt: skip
    return scan(LINEAR, b, {"out": b.dtype}, reverse=reverse, a=a, h0=h0, steps=steps, channels=channels, interpret=interpret)["out"]


def supports(
    target: str, a: Any, b: Any, h0: Any, reverse: bool, *, steps: Optional[int] = None, channels: Optional[int] = None
) -> str | None:
    return too_large(target, b, 3, steps, channels)
