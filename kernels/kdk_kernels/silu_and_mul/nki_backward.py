"""Gradients of SiLU-and-multiply in NKI; a gradient that is not needed is neither computed nor stored.

The derivative of silu and silu itself come from ScalarE, products from VectorE; GpSimd takes one of the products, because three
of them would keep VectorE busy for longer than the data takes to arrive.
"""

from __future__ import annotations

from typing import Optional

import nki
import nki.isa as nisa
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run
from kdk_kernels.silu_and_mul.nki import PARTITIONS, lines, tile_width


def load(line, stride, row, column, height, part):
    tile = nl.ndarray((height, part), dtype=line.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=line.ap([[stride, height], [1, part]], offset=row * stride + column))
    return tile


def times_activation(gate, op, factor, dst):
    """dst = op(gate) * factor; op(gate) is not rounded in between."""
    activated = nl.ndarray(gate.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=activated, op=op, data=gate)
    result = nl.ndarray(gate.shape, dtype=dst.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result, data1=activated, data2=factor, op=nl.multiply)
    nisa.dma_copy(dst=dst, src=result)


@nki.jit
def both_kernel(grad, grad_stride, gate, gate_stride, up, up_stride, rows, columns, width):
    """Lines of elements as in the forward kernel -> grad_gate, grad_up (rows, columns)."""
    grad_gate = nl.ndarray((rows, columns), dtype=gate.dtype, buffer=nl.shared_hbm)
    grad_up = nl.ndarray((rows, columns), dtype=gate.dtype, buffer=nl.shared_hbm)
    for row in range(0, rows, PARTITIONS):
        height = min(PARTITIONS, rows - row)
        for column in range(0, columns, width):
            part = min(width, columns - column)
            d = load(grad, grad_stride, row, column, height, part)
            g = load(gate, gate_stride, row, column, height, part)
            u = load(up, up_stride, row, column, height, part)
            product = nl.ndarray((height, part), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=product, data1=d, data2=u, op=nl.multiply, engine=nisa.engine.gpsimd)
            times_activation(g, nl.silu_dx, product, grad_gate[row : row + height, column : column + part])
            times_activation(g, nl.silu, d, grad_up[row : row + height, column : column + part])
    return grad_gate, grad_up


@nki.jit
def gate_kernel(grad, grad_stride, gate, gate_stride, up, up_stride, rows, columns, width):
    """Lines of elements as in the forward kernel -> grad_gate (rows, columns)."""
    grad_gate = nl.ndarray((rows, columns), dtype=gate.dtype, buffer=nl.shared_hbm)
    for row in range(0, rows, PARTITIONS):
        height = min(PARTITIONS, rows - row)
        for column in range(0, columns, width):
            part = min(width, columns - column)
            d = load(grad, grad_stride, row, column, height, part)
            g = load(gate, gate_stride, row, column, height, part)
            u = load(up, up_stride, row, column, height, part)
            product = nl.ndarray((height, part), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=product, data1=d, data2=u, op=nl.multiply, engine=nisa.engine.gpsimd)
            times_activation(g, nl.silu_dx, product, grad_gate[row : row + height, column : column + part])
    return grad_gate


@nki.jit
def up_kernel(grad, grad_stride, gate, gate_stride, rows, columns, width):
    """Lines of elements as in the forward kernel -> grad_up (rows, columns)."""
    grad_up = nl.ndarray((rows, columns), dtype=gate.dtype, buffer=nl.shared_hbm)
    for row in range(0, rows, PARTITIONS):
        height = min(PARTITIONS, rows - row)
        for column in range(0, columns, width):
            part = min(width, columns - column)
            d = load(grad, grad_stride, row, column, height, part)
            g = load(gate, gate_stride, row, column, height, part)
            times_activation(g, nl.silu, d, grad_up[row : row + height, column : column + part])
    return grad_up


def backward(
    grad: Tensor, gate: Tensor, up: Optional[Tensor], needs: str
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    names = needs.split(",")
    tensors = [grad, gate] if "gate" not in names or up is None else [grad, gate, up]
    rows, columns, with_strides = lines(*tensors)
    arguments = [a for line_and_stride in with_strides for a in line_and_stride]
    arguments += [rows, columns, tile_width(columns, gate.itemsize)]
    if "gate" not in names:
        return None, run(up_kernel, *arguments).reshape(gate.shape)
    if "up" not in names:
        return run(gate_kernel, *arguments).reshape(gate.shape), None
    grad_gate, grad_up = run(both_kernel, *arguments)
    return grad_gate.reshape(gate.shape), grad_up.reshape(gate.shape)
