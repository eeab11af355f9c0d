"""Plain-torch spellings that sample_top_k_top_p replaces. Each takes (logits, uniform) and draws the operator's token with the given
filters, where no logits are equal. They stand in the loops of generation and serving, not in the forward of a module: nothing to patch.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def drawn(logits: Tensor, uniform: Tensor) -> Tensor:
    """Inversion in place of torch.multinomial, whose random numbers are its own."""
    running = logits.softmax(-1).cumsum(-1)
    return (running <= uniform.unsqueeze(-1) * running[:, -1:]).sum(-1).to(torch.int32)


def warpers(logits: Tensor, uniform: Tensor, k: int, p: float, min_p: float, temperature: float) -> Tensor:
    """transformers' TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper, one after the other."""
    scores = logits / temperature
    scores = scores.masked_fill(scores < scores.topk(k).values[:, -1:], -torch.inf)
    ordered, order = scores.sort(-1, descending=False)
    small = ordered.softmax(-1).cumsum(-1) <= 1 - p
    small[:, -1:] = False
    scores = scores.masked_fill(small.scatter(1, order, small), -torch.inf)
    probabilities = scores.softmax(-1)
    scores = scores.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
    return drawn(scores, uniform)


def one_sort(logits: Tensor, uniform: Tensor, k: int, p: float, temperature: float) -> Tensor:
    """vLLM's in plain torch: both masks on one sorted copy, which is put back in order."""
    ordered, order = (logits / temperature).sort(-1, descending=False)
    ordered = ordered.masked_fill(ordered < ordered[:, -k].unsqueeze(-1), -torch.inf)
    small = ordered.softmax(-1).cumsum(-1) <= 1 - p
    small[:, -1] = False
    ordered = ordered.masked_fill(small, -torch.inf)
    return drawn(ordered.scatter(-1, order, ordered), uniform)


SPELLINGS: tuple[tuple[Callable[..., Tensor], Mapping[str, float]], ...] = (
    (warpers, {"k": 20, "p": 0.9, "min_p": 0.05, "temperature": 0.7}),
    (one_sort, {"k": 20, "p": 0.9, "temperature": 0.7}),
)
"""(function, the arguments with which the operator equals it)."""
