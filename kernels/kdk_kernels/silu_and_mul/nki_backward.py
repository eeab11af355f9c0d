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
from kdk_kernels.silu_and_mul.nki import box, lines, load, number_of, times_activation


@nki.jit
def silu_and_mul_backward_kernel(
    needs_gate, needs_up, rows, columns, pieces, width, grad, grad_stride, gate, gate_stride, up=None, up_stride=0
):
    """Tensors as `lines` prepares them -> the needed ones of grad_gate and grad_up, (rows, columns)."""
    if needs_gate:
        grad_gate = nl.ndarray((rows, columns), dtype=gate.dtype, buffer=nl.shared_hbm)
    if needs_up:
        grad_up = nl.ndarray((rows, columns), dtype=gate.dtype, buffer=nl.shared_hbm)
    layout = (rows, columns, pieces, width)
    tiles = number_of(layout)
    next_d, next_g = load(grad, grad_stride, 0, layout), load(gate, gate_stride, 0, layout)
    next_u = load(up, up_stride, 0, layout) if needs_gate else None
    for i in range(tiles):
        d, g, u = next_d, next_g, next_u
        if i + 1 < tiles:  # before the results of this tile are stored: DMA goes in program order
            next_d, next_g = load(grad, grad_stride, i + 1, layout), load(gate, gate_stride, i + 1, layout)
            next_u = load(up, up_stride, i + 1, layout) if needs_gate else None
        row, column, height, part = box(i, layout)
        if needs_gate:
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
