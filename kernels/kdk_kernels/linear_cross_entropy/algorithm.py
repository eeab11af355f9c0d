"""linear_cross_entropy, forward, in plain torch: the vocabulary in chunks, with a running maximum and sum for every row."""

import math
from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor

from kdk_kernels.linear_cross_entropy.reference import logits, loss_of

PARTS = 128  # of the logits: one at a time exists, and a few results of its size, in the backward four
LEAST = 1 << 20  # elements of a part: smaller problems need no more than one


def parts(N: int, V: int) -> Iterator[slice]:
    """The vocabulary in pieces."""
    width = max(-(-V // PARTS), LEAST // max(N, 1))
    return (slice(start, min(start + width, V)) for start in range(0, V, width))


def forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor],
    ignore_index: int,
    label_smoothing: float,
    softcap: Optional[float],
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    V, dtype = weight.shape[0], torch.promote_types(x.dtype, torch.float32)
    labels, N = target.reshape(-1), target.numel()
    rows = x.reshape(N, weight.shape[1]).to(dtype)
    largest = rows.new_full((N, 1), -math.inf)
    sums = rows.new_zeros((N, 1))
    hit = rows.new_full((N,), math.nan)
    total = rows.new_zeros((N,)) if label_smoothing else None
    for part in parts(N, V):
        z = logits(rows, weight[part], None if bias is None else bias[part], softcap)
        place = labels - part.start
        inside = (place >= 0) & (place < z.shape[1])
        at = place.long().clamp(0, z.shape[1] - 1).unsqueeze(1)
        hit = torch.where(inside, z.gather(1, at).squeeze(1), hit)
        if total is not None:
            total = total + z.sum(1)
        new = torch.maximum(largest, z.amax(1, keepdim=True))
        shift = torch.where(new == -math.inf, 0.0, new)
        sums = sums * (largest - shift).exp() + z.sub_(shift).exp_().sum(1, keepdim=True)
        largest = new
        del z  # before the next part is multiplied
    lse = (torch.where(largest == -math.inf, 0.0, largest) + sums.log()).squeeze(1)
    loss = loss_of(lse, hit, total, V, labels == ignore_index, label_smoothing, z_loss)
    return loss.reshape(target.shape), lse.reshape(target.shape)
