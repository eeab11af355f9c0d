"""add_rms_norm, backward, in Triton: rms_norm's kernels, which add the gradient of the residual stream to theirs."""

from typing import Optional

import torch
from torch import Tensor

from kdk_kernels.rms_norm.triton import TUNABLE as TUNABLE
from kdk_kernels.rms_norm.triton_backward import gradients


def backward(
    grad_y: Optional[Tensor],
    grad_new_residual: Optional[Tensor],
    new_residual: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    needs: str,
    *,
    elements: Optional[int] = None,
    warps: Optional[int] = None,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    needed = needs.split(",")
    of_sum = [name for name in ("x", "residual") if name in needed]
    dweight: Optional[Tensor] = None
    if grad_y is not None:
        found, dweight = gradients(
            grad_y, new_residual, weight, rstd, offset, len(of_sum), "weight" in needed, elements, warps, grad_new_residual
        )
    elif grad_new_residual is not None:  # nothing to compute: the sum passes its gradient on
        found = [grad_new_residual.clone(memory_format=torch.contiguous_format) for _ in of_sum]
    else:
        found = []
    results = dict(zip(of_sum, found))
    return results.get("x"), results.get("residual"), dweight
