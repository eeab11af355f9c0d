"""linear_cross_entropy, backward, in Pallas: one kernel for dx, past whose rows the vocabulary streams, and one for dweight and
dbias, past whose part of the vocabulary the rows stream. Each multiplies the logits again; nothing of their size is stored.
"""

import functools
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdk_kernels.linear_cross_entropy.pallas import LANES, PARTS, dot, padded, product, up_to

VMEM = 40 << 20
STAYING, STREAMING = 26 << 20, 8 << 20  # bytes of a block that stays, with its gradient and that one's sum, and of one that does not
MOST_STAYING, MOST_STREAMING = 1024, 384
TUNABLE = {"staying": (128, 256, 512, 768, 1024), "streaming": (128, 256, 384)}  # rows of a block that stays, and of one that does not
ROW = 16  # rows of a bfloat16 tile: the least block of x
Scalars = tuple[int, int, float, Optional[float], float]  # V, ignore_index, label_smoothing, softcap, z_loss


def stored(H: int, itemsize: int) -> tuple[int, int]:
    """Bytes of a row in VMEM: of a block that stays, and of one that streams."""
    return H * (4 * itemsize + 4 + PARTS[itemsize]), H * (2 * itemsize + PARTS[itemsize])


def blocks(H: int, itemsize: int, staying: Optional[int], streaming: Optional[int]) -> tuple[int, int]:
    """Rows of a block that stays in VMEM, which holds it and its gradient twice and a float32 sum, and of one that streams."""
    of_staying, of_streaming = stored(H, itemsize)
    staying = staying or min(STAYING // of_staying // LANES * LANES, MOST_STAYING)
    return staying, streaming or min(max(LANES, STREAMING // of_streaming // LANES * LANES), MOST_STREAMING)


def _gradient(scalars: Scalars, first: Any, x: Any, weight: Any, bias: Any, target: Any, lse: Any, grad: Any) -> Any:
    """The gradient of the logits from column `first` on, as stored: (rows, columns)."""
    V, ignore_index, label_smoothing, softcap, z_loss = scalars
    z = product(x, slice(None), weight)
    if bias is not None:
        z += bias[...]
    slope = None
    if softcap is not None:
        z = z / softcap
        # 1 - tanh(z)^2, which would take over the error of a hardware's tanh, and lose all digits where that is nearly 1.
        e = jnp.exp(-2 * jnp.abs(z))
        slope = 4 * e / ((1 + e) * (1 + e))
        z = jnp.tanh(z) * softcap
    column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1) + first
    d = jnp.exp(jnp.minimum(z - lse[...], 0.0))
    if z_loss:
        d *= 1 + 2 * z_loss * lse[...]
    d -= jnp.where(column == target[...], 1 - label_smoothing, 0.0)
    if label_smoothing:
        d -= label_smoothing / V
    if slope is not None:
        d *= slope
    kept = target[...] != ignore_index
    if V % weight.shape[0]:
        kept &= column < V
    return jnp.where(kept, d * grad[...], 0.0).astype(x.dtype)


def _of_x(scalars: Scalars, has_bias: bool, x: Any, weight: Any, target: Any, lse: Any, grad: Any, *refs: Any) -> None:
    bias, (dx, total) = (refs[0], refs[1:]) if has_bias else (None, refs)
    j, last, (width, V) = pl.program_id(1), pl.num_programs(1) - 1, (weight.shape[0], scalars[0])

    @pl.when(j == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    def work(ragged: bool) -> None:
        d, w = _gradient(scalars, j * width, x, weight, bias, target, lse, grad), weight[...]
        if ragged:  # past the end a block holds anything, NaN too
            w = jnp.where(jax.lax.broadcasted_iota(jnp.int32, w.shape, 0) < V - j * width, w, jnp.zeros_like(w))
        total[...] += dot(d, w, (1, 0))

    if V % width:
        pl.when(j < last)(functools.partial(work, False))
        pl.when(j == last)(functools.partial(work, True))
    else:
        work(False)

    @pl.when(j == last)
    def _() -> None:
        dx[...] = total[...].astype(dx.dtype)


def _of_weight(
    scalars: Scalars, has_bias: bool, needed: tuple[str, ...], x: Any, weight: Any, target: Any, lse: Any, grad: Any, *refs: Any
) -> None:
    bias, (*results, total) = (refs[0], refs[1:]) if has_bias else (None, refs)
    named = dict(zip(needed, results))
    j, i, last = pl.program_id(0), pl.program_id(1), pl.num_programs(1) - 1

    @pl.when(i == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)
        if "bias" in named:
            named["bias"][...] = jnp.zeros_like(named["bias"])

    d = _gradient(scalars, j * weight.shape[0], x, weight, bias, target, lse, grad)
    if "bias" in named:
        named["bias"][...] += jnp.sum(d.astype(jnp.float32), axis=0, keepdims=True)
    if "weight" in named:
        total[...] += dot(d, x[...], (0, 0))

        @pl.when(i == last)
        def _() -> None:
            named["weight"][...] = total[...].astype(named["weight"].dtype)


class _Call:
    """What the two kernels share: operands, where their blocks lie, and how the kernel runs.

    rows, width: of a block of x and of weight. outer: "rows" or "columns", the one that stays while the other streams.
    """

    def __init__(self, operands: tuple[Any, ...], scalars: Scalars, rows: int, width: int, outer: str) -> None:
        x, weight, target, bias, lse, grad = operands
        (V, H), self.bias = weight.shape, bias is not None
        self.N, self.H, self.V, self.itemsize = x.size // H, H, V, x.dtype.itemsize
        self.arrays = [padded(x.reshape(-1, H), rows), padded(weight, width) if width > V else weight]
        self.arrays += [padded(target.reshape(-1, 1), rows, scalars[1]), *(padded(t.reshape(-1, 1), rows) for t in (lse, grad))]
        steps = len(self.arrays[0]) // rows, pl.cdiv(V, width)
        by_rows = outer == "rows"
        self.grid = steps if by_rows else (steps[1], steps[0])
        self.of_x = pl.BlockSpec((rows, H), lambda a, b: (a if by_rows else b, 0))
        self.of_weight = pl.BlockSpec((width, H), lambda a, b: (b if by_rows else a, 0))
        self.of_bias = pl.BlockSpec((1, width), lambda a, b: (0, b if by_rows else a))
        of_row = pl.BlockSpec((rows, 1), lambda a, b: (a if by_rows else b, 0))
        self.specs = [self.of_x, self.of_weight, of_row, of_row, of_row]
        if bias is not None:
            self.arrays.append(padded(bias.astype(jnp.float32), width)[None, :])
            self.specs.append(self.of_bias)
        self.summed = (rows if by_rows else width, H)
        self.streamed = self.grid[0] * (V if by_rows else self.N)

    def run(self, kernel: Any, shapes: list[Any], specs: list[Any], interpret: Any) -> Any:
        return pl.pallas_call(
            kernel,
            out_shape=shapes,
            grid=self.grid,
            in_specs=self.specs,
            out_specs=specs,
            scratch_shapes=[pltpu.VMEM(self.summed, jnp.float32)],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM),
            cost_estimate=pl.CostEstimate(
                flops=4 * self.N * self.H * self.V,
                transcendentals=self.N * self.V,
                bytes_accessed=(self.streamed + self.N + self.V) * self.H * self.itemsize,
            ),
            interpret=interpret,
        )(*self.arrays)


def backward(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    target: jax.Array,
    bias: Optional[jax.Array],
    lse: jax.Array,
    ignore_index: int,
    label_smoothing: float,
    softcap: Optional[float],
    z_loss: float,
    needs: str,
    *,
    staying: Optional[int] = None,
    streaming: Optional[int] = None,
    interpret: Any = False,
) -> tuple[Optional[jax.Array], Optional[jax.Array], Optional[jax.Array]]:
    V, H = weight.shape
    N = x.size // H
    needed = tuple(name for name in ("weight", "bias") if name in needs.split(","))
    staying, streaming = blocks(H, x.dtype.itemsize, staying, streaming)
    operands: tuple[Any, ...] = (x, weight, target, bias, lse, grad)
    scalars: Scalars = (V, ignore_index, label_smoothing, softcap, z_loss)
    dx, named = None, {}
    if "x" in needs.split(","):
        call = _Call(operands, scalars, min(staying, up_to(N, ROW)), min(streaming, up_to(V, LANES)), "rows")
        shapes = [jax.ShapeDtypeStruct(call.arrays[0].shape, x.dtype)]
        (dx,) = call.run(functools.partial(_of_x, scalars, call.bias), shapes, [call.of_x], interpret)
        dx = dx[:N].reshape(x.shape)
    if needed:
        call = _Call(operands, scalars, min(streaming, up_to(N, ROW)), min(staying, up_to(V, LANES)), "columns")
        all_shapes = {"weight": jax.ShapeDtypeStruct(call.arrays[1].shape, weight.dtype)}
        all_shapes["bias"] = jax.ShapeDtypeStruct((1, len(call.arrays[1])), jnp.float32)
        specs = {"weight": call.of_weight, "bias": call.of_bias}
        kernel = functools.partial(_of_weight, scalars, call.bias, needed)
        found = call.run(kernel, [all_shapes[name] for name in needed], [specs[name] for name in needed], interpret)
        named = dict(zip(needed, found))
    dbias = named["bias"][0, :V].astype(weight.dtype) if "bias" in named else None
    return dx, named["weight"][:V] if "weight" in named else None, dbias


def supports(
    target: str, grad: Any, x: Any, weight: Any, labels: Any, bias: Any, lse: Any,
    ignore_index: int, label_smoothing: float, softcap: Any, z_loss: float, needs: str,
    *, staying: Optional[int] = None, streaming: Optional[int] = None,
) -> str | None:  # fmt: skip
    """The least blocks hold whole rows, of x or weight and of the float32 sums of their gradients."""
    size, parts = x.itemsize, PARTS[x.itemsize]
    together = (STAYING + STREAMING) // (LANES * (6 * size + 4 + 2 * parts))
    widest = min(STAYING // (LANES * (4 * size + 4 + parts)), STREAMING // (2 * LANES * size), together)
    H = x.shape[-1]
    if widest < H:
        return f"H = {H}: {LANES} rows and their sums fit VMEM up to H = {widest}"
    if staying is None and streaming is None:
        return None
    rows, room = blocks(H, size, staying, streaming), STAYING + STREAMING
    taken = sum(n * each for n, each in zip(rows, stored(H, size)))
    return f"{rows[0]} rows that stay and {rows[1]} that stream take {taken} bytes of VMEM, of {room}" if taken > room else None
