"""sample_top_k_top_p in plain torch without a sort: the thresholds are found bit by bit.

Of the ordered floats, the largest t is wanted for which the logits that are at least t are k or more, or weigh the share p or
more. Floats order like their bits read as integers, so bisection between the bits of -inf and of the largest logit ends at
exactly that float, after as many passes over the logits as they have bits.
"""

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor

from kdk_kernels.sample_top_k_top_p.reference import COLDEST

GROUP = 512  # tokens whose kept weights are summed before the running sum: short sums round little
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def ordered(bits: Tensor) -> Tensor:
    """The bits of floats as integers of the same order, and back."""
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & torch.iinfo(bits.dtype).max)


def largest(logits: Tensor, most: Tensor, enough: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest t (N, 1) up to the largest logit for which `enough` of the tokens, (N, V), have logits of at least t."""
    integers = BITS[logits.dtype]
    low = ordered(torch.full_like(most, -torch.inf).view(integers))
    high = ordered(most.view(integers)) + 1
    for _ in range(8 * logits.itemsize):
        middle = (low & high) + ((low ^ high) >> 1)
        good = enough(logits >= ordered(middle).view(logits.dtype))
        low, high = middle.where(good, low), high.where(good, middle)
    return ordered(low).view(logits.dtype)


def forward(
    logits: Tensor, uniform: Tensor, k: Optional[Tensor], p: Optional[Tensor], min_p: Optional[Tensor], temperature: Optional[Tensor]
) -> tuple[Tensor, Tensor]:
    V, most = logits.shape[-1], logits.amax(-1, keepdim=True)
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) - most
    if temperature is not None:
        scaled = scaled / temperature.to(scaled.dtype).clamp(min=COLDEST).unsqueeze(-1)
    weight = scaled.exp()
    kept = weight
    if k is not None:
        wanted = k.where((k > 0) & (k < V), V).unsqueeze(-1)
        least = largest(logits, most, lambda chosen: chosen.sum(-1, keepdim=True) >= wanted)
        kept = kept.where(logits >= least, 0.0)
    if p is not None:
        cut, share = kept, p.unsqueeze(-1)
        needed = (share * cut.sum(-1, keepdim=True)).clamp(min=COLDEST)
        least = largest(logits, most, lambda chosen: cut.where(chosen, 0.0).sum(-1, keepdim=True) >= needed)
        kept = kept.where((logits >= least) | (share >= 1.0), 0.0)
    if min_p is not None:
        kept = kept.where(weight >= min_p.unsqueeze(-1), 0.0)
    where = uniform if temperature is None else uniform.where(temperature > 0.0, 0.0)
    token, total = draw(kept, where.unsqueeze(-1))
    logprob = scaled.gather(-1, token) - total.log()
    is_distribution = weight.sum(-1) > 0.0
    return (
        token.squeeze(-1).where(is_distribution, -1).to(torch.int32),
        logprob.squeeze(-1).where(is_distribution, torch.nan),
    )


def draw(kept: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The first token (N, 1) whose running sum of kept weights exceeds uniform * total, and the total: a group, then a token in it."""
    groups = torch.nn.functional.pad(kept, (0, -kept.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    sums = groups.sum(-1)
    running = sums.cumsum(-1)
    total = running[:, -1:]
    group, left = first_above(sums, running, uniform * total)
    mine = groups.gather(1, group.unsqueeze(-1).expand(-1, -1, GROUP)).squeeze(1)
    token, _ = first_above(mine, mine.cumsum(-1), left)
    return (group * GROUP + token).clamp(max=kept.shape[-1] - 1), total


def first_above(weights: Tensor, running: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first place whose running sum exceeds the target, at most the last that weighs anything; and the target from there on."""
    last = (weights.flip(-1) > 0.0).to(torch.int32).argmax(-1, keepdim=True)
    place = (running <= target).sum(-1, keepdim=True).minimum(weights.shape[-1] - 1 - last)
    before = torch.cat((torch.zeros_like(running[:, :1]), running[:, :-1]), -1)
    return place, target - before.gather(-1, place)


def supports(target: str, logits: Tensor, *others: object) -> Optional[str]:
    return "PyTorch/XLA does not read a float's bits as an integer, view(dtype)" if logits.device.type == "xla" else None
