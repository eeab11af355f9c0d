"""SiLU-and-multiply in Pallas for TPU: a grid of blocks of rows and columns, each computed in VMEM."""

import math
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdk.backends.pallas import SCOPED_VMEM

LANES = 128
SUBLANES = 16  # rows of a tile of a 16-bit type; a multiple for 32 bits too
BLOCK_BYTES = 512 * 1024  # of one operand: backward holds five, each twice, inside the 16 MiB that a v5e kernel gets
TUNABLE = {"block_bytes": tuple(1 << n for n in range(16, 22))}  # of one operand
COLUMNS, MAX_COLUMNS = 2048, 8192  # of a block: wide blocks where few rows would leave them small


def sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def block_shape(rows: int, columns: int, itemsize: int, block_bytes: int) -> tuple[int, int]:
    """Multiples of a tile, or a whole dimension, as the (8, 128) tiling wants. Pallas pads the blocks at the edges."""
    fitting = block_bytes // (pl.cdiv(rows, SUBLANES) * SUBLANES * itemsize)
    parts = pl.cdiv(columns, min(max(fitting, COLUMNS), MAX_COLUMNS))
    width = columns if parts == 1 else pl.cdiv(pl.cdiv(columns, parts), LANES) * LANES
    height = max(SUBLANES, block_bytes // (max(width, LANES) * itemsize) // SUBLANES * SUBLANES)
    return min(height, rows), width


def elementwise(
    kernel: Any, inputs: list[jax.Array], outputs: int, flops: int, exps: int, block_bytes: Optional[int], interpret: Any
) -> list[jax.Array]:
    """Run `kernel` over all blocks; outputs have the inputs' shape and dtype. `flops` and `exps` count per element."""
    shape, dtype = inputs[0].shape, inputs[0].dtype
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    block = block_shape(rows, columns, dtype.itemsize, block_bytes or BLOCK_BYTES)
    spec = pl.BlockSpec(block, lambda i, j: (i, j))
    results = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, block[0]), pl.cdiv(columns, block[1])),
        in_specs=[spec] * len(inputs),
        out_specs=[spec] * outputs,
        out_shape=[jax.ShapeDtypeStruct((rows, columns), dtype)] * outputs,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=flops * rows * columns,
            transcendentals=exps * rows * columns,
            bytes_accessed=(len(inputs) + outputs) * rows * columns * dtype.itemsize,
        ),
        interpret=interpret,
    )(*(x.reshape(rows, columns) for x in inputs))
    return [y.reshape(shape) for y in results]


def silu_and_mul_kernel(gate_ref: Any, up_ref: Any, y_ref: Any) -> None:
    gate = gate_ref[...].astype(jnp.float32)
    y_ref[...] = (gate * sigmoid(gate) * up_ref[...].astype(jnp.float32)).astype(y_ref.dtype)


def forward(gate: jax.Array, up: jax.Array, *, block_bytes: Optional[int] = None, interpret: Any = False) -> jax.Array:
    (y,) = elementwise(silu_and_mul_kernel, [gate, up], outputs=1, flops=5, exps=1, block_bytes=block_bytes, interpret=interpret)
    return y


def too_large(target: str, itemsize: int, operands: int, block_bytes: Optional[int]) -> str | None:
    """Why blocks of that size do not fit VMEM: each operand stands there twice, and two of them in float32."""
    most = SCOPED_VMEM.get(target, min(SCOPED_VMEM.values())) // (2 * operands + 2 * 4 // itemsize)
    if block_bytes is None or block_bytes <= most:
        return None
    return f"block_bytes = {block_bytes}: {operands} operands fit VMEM up to {most} bytes of each"


def supports(target: str, gate: Any, up: Any, *, block_bytes: Optional[int] = None) -> str | None:
    return too_large(target, gate.itemsize, 3, block_bytes)
