"""Gradients of the rotary position embedding for TPUs: the kernel of the forward, with the transposed rotation."""

from typing import Any, Optional

import jax

from kdk_kernels.rope.pallas import TUNABLE as TUNABLE
from kdk_kernels.rope.pallas import rotate, too_many_heads


def backward(
    grad_q_out: Optional[jax.Array],
    grad_k_out: Optional[jax.Array],
    cos: jax.Array,
    sin: jax.Array,
    interleaved: bool,
    needs: str,
    *,
    tokens: Optional[int] = None,
    interpret: Any = False,
) -> tuple[Optional[jax.Array], Optional[jax.Array]]:
    needed = needs.split(",")
    grads = [g if name in needed else None for name, g in (("q", grad_q_out), ("k", grad_k_out))]
    given = [g for g in grads if g is not None]
    rotated = iter(rotate(given, cos, sin, interleaved, transposed=True, block=tokens, interpret=interpret) if given else [])
    grad_q, grad_k = (None if g is None else next(rotated) for g in grads)
    return grad_q, grad_k


def supports(
    target: str, grad_q_out: Any, grad_k_out: Any, cos: Any, sin: Any, interleaved: bool, needs: str, *, tokens: Optional[int] = None
) -> str | None:
    return too_many_heads([g for g in (grad_q_out, grad_k_out) if g is not None], tokens)
