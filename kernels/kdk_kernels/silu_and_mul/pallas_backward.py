"""Gradients of SiLU-and-multiply in Pallas; a gradient that is not needed is neither computed nor stored."""

from typing import Any, Optional

import jax
import jax.numpy as jnp

from kdk_kernels.silu_and_mul.pallas import TUNABLE as TUNABLE
from kdk_kernels.silu_and_mul.pallas import elementwise, sigmoid, too_large


def gate_gradient(grad: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    # sigmoid(-gate) and not 1 - sigmoid(gate): the difference loses the small values that gate multiplies.
    return grad * up * (sigmoid(gate) * (1.0 + gate * sigmoid(-gate)))


def up_gradient(grad: jax.Array, gate: jax.Array) -> jax.Array:
    return grad * (gate * sigmoid(gate))


def both_kernel(grad_ref: Any, gate_ref: Any, up_ref: Any, grad_gate_ref: Any, grad_up_ref: Any) -> None:
    grad, gate, up = (ref[...].astype(jnp.float32) for ref in (grad_ref, gate_ref, up_ref))
    grad_gate_ref[...] = gate_gradient(grad, gate, up).astype(grad_gate_ref.dtype)
    grad_up_ref[...] = up_gradient(grad, gate).astype(grad_up_ref.dtype)


def gate_kernel(grad_ref: Any, gate_ref: Any, up_ref: Any, grad_gate_ref: Any) -> None:
    grad, gate, up = (ref[...].astype(jnp.float32) for ref in (grad_ref, gate_ref, up_ref))
    grad_gate_ref[...] = gate_gradient(grad, gate, up).astype(grad_gate_ref.dtype)


def up_kernel(grad_ref: Any, gate_ref: Any, grad_up_ref: Any) -> None:
    grad, gate = (ref[...].astype(jnp.float32) for ref in (grad_ref, gate_ref))
    grad_up_ref[...] = up_gradient(grad, gate).astype(grad_up_ref.dtype)


def backward(
    grad: jax.Array, gate: jax.Array, up: Optional[jax.Array], needs: str, *, block_bytes: Optional[int] = None, interpret: Any = False
) -> tuple[Optional[jax.Array], Optional[jax.Array]]:
    names, how = needs.split(","), {"block_bytes": block_bytes, "interpret": interpret}
    if "gate" not in names:
        (grad_up,) = elementwise(up_kernel, [grad, gate], outputs=1, flops=5, exps=1, **how)
        return None, grad_up
    assert up is not None, "the engine passes up where the gradient of gate is needed"
    if "up" not in names:
        (grad_gate,) = elementwise(gate_kernel, [grad, gate, up], outputs=1, flops=11, exps=2, **how)
        return grad_gate, None
    grad_gate, grad_up = elementwise(both_kernel, [grad, gate, up], outputs=2, flops=13, exps=2, **how)
    return grad_gate, grad_up


def supports(target: str, grad: Any, gate: Any, up: Any, needs: str, *, block_bytes: Optional[int] = None) -> str | None:
    return too_large(target, gate.itemsize, 5, block_bytes)
