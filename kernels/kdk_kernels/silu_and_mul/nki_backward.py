"""Gradients of SiLU-and-multiply in NKI; a gradient that is not needed is neither computed nor stored.

silu and its derivative come from ScalarE, products from VectorE. GpSimd takes grad * up: with all three products
VectorE would be busy for much longer than the data takes to arrive.
"""

from typing import Optional

import nki
import nki.isa as nisa
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run
from kdk_kernels.silu_and_mul.nki import PARTITIONS, lines, load, times_activation


@nki.jit
def silu_and_mul_backward_kernel(
    needs_gate, needs_up, rows, columns, pieces, width, grad, grad_stride, gate, gate_stride, up=None, up_stride=0
):
    """Tensors as `lines` prepares them -> the needed ones of grad_gate and grad_up, (rows, columns)."""
    if needs_gate:
        grad_gate = nl.ndarray((rows, columns), dtype=gate.dtype, buffer=nl.shared_hbm)
    if needs_up:
        grad_up = nl.ndarray((rows, columns), dtype=gate.dtype, buffer=nl.shared_hbm)
    for row in range(0, rows, PARTITIONS):
        height = min(PARTITIONS, rows - row)
        for column in range(0, columns, width):
            part = min(width, columns - column)
            d = load(grad, grad_stride, row, column, height, part, columns, pieces)
            g = load(gate, gate_stride, row, column, height, part, columns, pieces)
            if needs_gate:
                u = load(up, up_stride, row, column, height, part, columns, pieces)
                product = nl.ndarray((height, part), dtype=nl.float32, buffer=nl.sbuf)
                nisa.tensor_tensor(dst=product, data1=d, data2=u, op=nl.multiply, engine=nisa.engine.gpsimd)
                times_activation(g, nl.silu_dx, product, grad_gate[row : row + height, column : column + part])
            if needs_up:
                times_activation(g, nl.silu, d, grad_up[row : row + height, column : column + part])
    if not needs_up:
        return grad_gate
    if not needs_gate:
        return grad_up
    return grad_gate, grad_up


def backward(
    grad: Tensor, gate: Tensor, up: Optional[Tensor], needs: str
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    names = needs.split(",")
    needs_gate, needs_up = "gate" in names, "up" in names
    tensors = [grad, gate] if up is None or not needs_gate else [grad, gate, up]
    spans, layout = lines(*tensors)
    arguments = [part for span in spans for part in span]
    grads = [g.reshape(gate.shape) for g in run(silu_and_mul_backward_kernel, needs_gate, needs_up, *layout, *arguments)]
    return grads[0] if needs_gate else None, grads[-1] if needs_up else None
