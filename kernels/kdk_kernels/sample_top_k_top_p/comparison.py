"""When a drawn token is right, and which logprob belongs to it."""

from typing import Any

import torch
from torch import Tensor

from kdk_kernels.sample_top_k_top_p.reference import distribution, least_of_top_k


def given(arguments: dict[str, Any], chosen: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The logprob of the tokens that were chosen."""
    scaled, _, kept, is_distribution = distribution(**{name: a for name, a in arguments.items() if name != "uniform"})
    token = chosen["token"].long().clamp(0, scaled.shape[-1] - 1).unsqueeze(-1)
    logprob = scaled.gather(-1, token) - kept.sum(-1, keepdim=True).log()
    return (logprob.squeeze(-1).where(is_distribution, torch.nan),)


def valid(arguments: dict[str, Any], chosen: dict[str, Tensor], tolerance: float) -> Tensor:
    """Whether each row's token is one that rounding may lead to.

    A weight is off by the rounding of its exponent: relative to the weight, tolerance * (1 + |exponent|). Where that decides whether
    a token is kept, both are right; the running sums that the draw compares then lie between those of the tokens that are
    kept for certain and those of all that may be kept.
    """
    logits, token = arguments["logits"], chosen["token"].long()
    V = logits.shape[-1]
    scaled, weight, _, is_distribution = distribution(**{name: a for name, a in arguments.items() if name != "uniform"})
    exponent = scaled.abs().where(weight > 0.0, 0.0)
    off = tolerance * (1.0 + exponent)
    slack = tolerance * (1.0 + (exponent * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True))
    certain = logits >= least_of_top_k(logits, arguments["k"])
    possible = certain.clone()
    if arguments["p"] is not None:
        p, above = arguments["p"].unsqueeze(-1), share_above(logits, weight.where(certain, 0.0))
        most = logits == logits.amax(-1, keepdim=True)
        certain &= (above < p - slack) | (p >= 1.0) | most
        possible &= (above < p + slack) | (p >= 1.0) | most
    if arguments["min_p"] is not None:
        least = arguments["min_p"].unsqueeze(-1)
        certain &= weight * (1.0 - off) >= least
        possible &= weight * (1.0 + off) >= least
    uniform = arguments["uniform"].clamp(max=1.0 - tolerance)
    if arguments["temperature"] is not None:
        uniform = uniform.where(arguments["temperature"] > 0.0, 0.0)
    fewest, most_of_it = weight.where(certain, 0.0), weight.where(possible, 0.0)
    inside = (token >= 0) & (token < V)
    at = token.clamp(0, V - 1).unsqueeze(-1)
    lower = (fewest.cumsum(-1) - fewest).gather(-1, at) / most_of_it.sum(-1, keepdim=True)
    upper = most_of_it.cumsum(-1).gather(-1, at) / fewest.sum(-1, keepdim=True)
    u = uniform.unsqueeze(-1)
    drawn = (lower - slack <= u) & (u < upper + slack) & (most_of_it.gather(-1, at) > 0.0)
    return torch.where(is_distribution, inside & drawn.squeeze(-1), token == -1)


def share_above(logits: Tensor, weight: Tensor) -> Tensor:
    """The share of all weight that tokens with larger logits have, (N, V)."""
    ordered, order = logits.sort(-1, descending=True)
    running = weight.gather(-1, order).cumsum(-1)
    before = torch.cat((torch.zeros_like(running[:, :1]), running[:, :-1]), -1)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = torch.where(starts, before, 0.0).cummax(-1).values  # equal logits: what is above the first of them
    return torch.zeros_like(first).scatter(-1, order, first) / running[:, -1:]
