"""SiLU-and-multiply in Pallas for TPU: a grid of blocks of rows and columns, each computed in VMEM."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SUBLANES = 16  # rows of a tile of a 16-bit type; a multiple for 32 bits too
BLOCK_BYTES = 512 * 1024  # of one operand: backward holds five, each twice, inside the 16 MiB that a v5e kernel gets
COLUMNS, MAX_COLUMNS = 2048, 8192  # of a block: wide blocks where few rows would leave them small


def sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def block_shape(rows: int, columns: int, itemsize: int) -> tuple[int, int]:
    """Multiples of a tile, or a whole dimension, as the (8, 128) tiling wants. Pallas pads the blocks at the edges."""
    fitting = BLOCK_BYTES // (pl.cdiv(rows, SUBLANES) * SUBLANES * itemsize)
    parts = pl.cdiv(columns, min(max(fitting, COLUMNS), MAX_COLUMNS))
    width = columns if parts == 1 else pl.cdiv(pl.cdiv(columns, parts), LANES) * LANES
    height = max(SUBLANES, BLOCK_BYTES // (max(width, LANES) * itemsize) // SUBLANES * SUBLANES)
    return min(height, rows), width


def elementwise(
    kernel: Any, inputs: list[jax.Array], outputs: int, flops: int, exps: int, interpret: Any
) -> list[jax.Array]:
    """Run `kernel` over all blocks; outputs have the inputs' shape and dtype. `flops` and `exps` count per element."""
    shape, dtype = inputs[0].shape, inputs[0].dtype
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    block = block_shape(rows, columns, dtype.itemsize)
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


def forward(gate: jax.Array, up: jax.Array, *, interpret: Any = False) -> jax.Array:
    (y,) = elementwise(silu_and_mul_kernel, [gate, up], outputs=1, flops=5, exps=1, interpret=interpret)
    return y
