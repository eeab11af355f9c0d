"""linear_cross_entropy, backward, in plain torch: the logits again, a part of the vocabulary at a time."""

from typing import Optional

import torch
from torch import Tensor

from kdk.rounding import as_stored
from kdk_kernels.linear_cross_entropy.algorithm import parts
from kdk_kernels.linear_cross_entropy.reference import gradient_of_logits, logits


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor],
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: Optional[float],
    z_loss: float,
    needs: str,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    needed, dtype = needs.split(","), torch.promote_types(x.dtype, torch.float32)
    (V, H), labels = weight.shape, target.reshape(-1)
    rows = x.reshape(target.numel(), H).to(dtype)
    scalars = V, label_smoothing, softcap, z_loss
    dx = rows.new_zeros(rows.shape) if "x" in needed else None
    dweight = weight.new_empty(V, H) if "weight" in needed else None
    dbias = bias.new_empty(V) if "bias" in needed and bias is not None else None
    for part in parts(rows.shape[0], V):
        z = logits(rows, weight[part], None if bias is None else bias[part], softcap)
        onehot = torch.arange(part.start, part.stop, device=x.device) == labels.unsqueeze(1)
        d = gradient_of_logits(z, onehot, grad.reshape(-1), labels == ignore_index, lse.reshape(-1), *scalars)
        d = as_stored(d, x.dtype)
        if dx is not None:
            dx.addmm_(d, weight[part].to(dtype))
        if dweight is not None:
            dweight[part] = d.t() @ rows
        if dbias is not None:
            dbias[part] = d.sum(0)
        del z, onehot, d  # before the next part is multiplied
    return None if dx is None else dx.to(x.dtype).reshape(x.shape), dweight, dbias
