"""Gradients of the rotary position embedding for GPUs: the kernel of the forward, with the transposed rotation."""

from typing import Optional

from torch import Tensor

from kdk_kernels.rope.triton import TUNABLE as TUNABLE
from kdk_kernels.rope.triton import new_like, rotate


def backward(
    grad_q_out: Optional[Tensor],
    grad_k_out: Optional[Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    needs: str,
    *,
    pairs: Optional[int] = None,
    warps: Optional[int] = None,
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    needed = needs.split(",")
    grads = [g if name in needed else None for name, g in (("q", grad_q_out), ("k", grad_k_out))]
    outputs = [None if g is None else new_like(g) for g in grads]
    jobs = [(g, out) for g, out in zip(grads, outputs) if g is not None and out is not None]
    if jobs:
        rotate(jobs, cos, sin, interleaved, transposed=True, pairs=pairs, warps=warps)
    return outputs[0], outputs[1]
