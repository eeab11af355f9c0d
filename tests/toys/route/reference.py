from typing import Any, Optional

import torch
from torch import Tensor


def route(
    x: Tensor, bias: Optional[Tensor] = None, k: int = 2, scale: Optional[float] = None, kind: str = "softmax"
) -> tuple[Tensor, Tensor, Tensor]:
    """The k experts with the largest probability plus bias, the lowest number first among equals, and their probabilities."""
    p = _scores(x, kind)
    chosen = _biased(p, bias).sort(dim=-1, descending=True, stable=True).indices[..., :k].to(torch.int32)
    weights, scores = given({"x": x, "scale": scale, "kind": kind}, {"experts": chosen})
    return weights, chosen, scores


def _scores(x: Tensor, kind: str) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.softmax(-1) if kind == "softmax" else x.sigmoid()


def _biased(p: Tensor, bias: Optional[Tensor]) -> Tensor:
    return p if bias is None else p + bias.to(p.dtype)


def given(arguments: dict[str, Any], chosen: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    x, scale = arguments["x"], arguments["scale"]
    p = _scores(x, arguments["kind"])
    return (p.gather(-1, chosen["experts"].long()) * (scale or 1.0)).to(x.dtype), p


def valid(arguments: dict[str, Any], chosen: dict[str, Tensor], tolerance: float) -> Tensor:
    """In falling order, and none left out that is larger; of exactly equal inputs the lowest number first. NaN: whatever."""
    x = arguments["x"]
    bias = torch.zeros(x.shape[-1:], dtype=x.dtype) if arguments["bias"] is None else arguments["bias"]
    p, bias = _scores(x, arguments["kind"]), bias.expand_as(x)
    score, slack = p + bias, tolerance * (p.abs() + bias.abs())
    at = chosen["experts"].long()
    taken = torch.zeros(x.shape, dtype=torch.int32).scatter_add(-1, at, torch.ones_like(at, dtype=torch.int32))
    n = torch.arange(x.shape[-1])
    right = (taken <= 1).all(-1)
    for i in range(at.shape[-1]):
        taken = taken.scatter(-1, at[..., : i + 1], 1).scatter(-1, at[..., i + 1 :], 0)
        mine = at[..., i : i + 1]
        free = (taken == 0).scatter(-1, mine, False)
        below = score.gather(-1, mine) + slack.gather(-1, mine) < score - slack
        tie = (x == x.gather(-1, mine)) & (bias == bias.gather(-1, mine)) & (n < mine)
        right &= ~(free & (below | tie)).any(-1)
    return right | torch.isnan(score).any(-1)


def route_backward(
    grad_weights: Optional[Tensor],
    grad_experts: Optional[Tensor],
    experts: Optional[Tensor],
    scores: Optional[Tensor],
    scale: Optional[float],
    kind: str,
    needs: str,
) -> Optional[Tensor]:
    if grad_weights is None or experts is None or scores is None:
        return None
    g = torch.zeros_like(scores).scatter(-1, experts.long(), grad_weights.to(scores.dtype) * (scale or 1.0))
    if kind == "softmax":
        g = scores * (g - (g * scores).sum(-1, keepdim=True))
    else:
        g = g * scores * (1 - scores)
    return g.to(grad_weights.dtype)


def check(x: Tensor, bias: Optional[Tensor] = None, k: int = 2, scale: Optional[float] = None, kind: str = "softmax") -> None: ...
