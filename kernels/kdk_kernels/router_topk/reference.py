"""router_topk in plain torch: the semantics every kernel is checked against."""

import math
from typing import Optional

import torch
from torch import Tensor

from kdk.errors import InputError

SCORINGS = ("softmax", "sigmoid")
TINY = 1e-20  # added to a sum of sigmoids before it divides, as in transformers' DeepSeek-V3


def router_topk(
    logits: Tensor,
    k: int,
    scoring: str = "softmax",
    groups: Optional[int] = None,
    top_groups: Optional[int] = None,
    bias: Optional[Tensor] = None,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Routing of a mixture of experts: the k best experts of every token, and their weights.

    score = softmax(logits) over all experts, or sigmoid(logits)
    indices = the k largest of score + bias, in descending order, equal ones by ascending index
    weights = scale * score[indices], renormalised: scale * score[indices] / sum(score[indices])

    Computed in float32 (float64 for float64) and rounded once. Without a bias experts are ranked by their logits, which
    score keeps in order: two logits whose scores round to one number (a saturated sigmoid) do not tie. With a bias near
    ties fall as float32 rounds score + bias.

    Groups, as in DeepSeek-V3: the experts are `groups` runs of neighbours, a group's score is the sum of its two largest
    score + bias, and only experts of the `top_groups` best groups are chosen (equal groups by ascending index).

    How models spell it (T tokens, E experts):
        Qwen3-MoE, Mixtral: router_topk(logits, k); the weights of a model that does not normalise: renormalize=False
        gpt-oss: router_topk(logits, k). It takes the softmax over the k chosen logits, which is the softmax over all of
            them, renormalised: the sum over the other experts cancels.
        DeepSeek-V3: router_topk(logits, 8, "sigmoid", 8, 4, bias, scale=2.5)

    Semantics: transformers' MixtralTopKRouter and DeepseekV3TopkRouter; DeepSeek-V3 Technical Report (arXiv 2412.19437),
    2.1.2. Renormalised sigmoids are divided by their sum plus 1e-20; the renormalised softmax is computed from the chosen
    logits alone, so it never divides by zero.

    Args:
        logits: (..., E), float32, bfloat16, float16 or float64, any strides.
        k: experts per token, 1 to E (to top_groups * E / groups).
        scoring: "softmax" or "sigmoid".
        groups: divides E into groups of at least two; None: no groups.
        top_groups: 1 to groups; None with groups=None.
        bias: (E,), the dtype of logits or float32: corrects the choice and not the weights. No gradient.
        renormalize: divide the chosen scores by their sum.
        scale: factor of the weights.

    Returns:
        weights: (..., k), the dtype of logits. indices: (..., k), int32. Both contiguous.

    Raises:
        kdk.errors.InputError: sizes or values that do not fit.

    Gradients: logits, through the weights; the choice is constant.

    NaN and infinities: a logit, a score + bias or a group's score that is NaN ranks with +inf, before all numbers; indices
    are always k different experts. A NaN or +inf among the chosen makes all softmax weights of its row NaN (without
    renormalising, any in the row does). A sigmoid of NaN is NaN, those of +inf and -inf are 1 and 0. -inf is an expert
    that is not wanted: the last choice, with weight 0; a softmax row of nothing else is NaN. NKI kernels rank -inf (without a
    bias a logit, else a score + bias) equal to float32's lowest number, -3.4e38: of the two the lower index comes first.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    x = logits.to(wide)
    indices = choose(x, k, scoring, groups, top_groups, None if bias is None else bias.to(wide))
    return weigh(x, indices, scoring, renormalize, scale).to(logits.dtype), indices.to(torch.int32)


def ranked(x: Tensor, scoring: str, bias: Optional[Tensor]) -> tuple[Tensor, Tensor]:
    """What experts are ranked by, and what groups are scored by."""
    scores = torch.softmax(x, -1) if scoring == "softmax" else torch.sigmoid(x)
    if bias is None:
        return nan_first(x), nan_first(scores)
    return nan_first(scores + bias), nan_first(scores + bias)


def nan_first(x: Tensor) -> Tensor:
    return torch.where(torch.isnan(x), math.inf, x)


def choose(x: Tensor, k: int, scoring: str, groups: Optional[int], top_groups: Optional[int], bias: Optional[Tensor]) -> Tensor:
    """The chosen experts, int64, of logits (and a bias) in the dtype to compute in."""
    key, scores = ranked(x, scoring, bias)
    order = _descending(key)
    if groups is not None:
        best = nan_first(scores.unflatten(-1, (groups, -1)).topk(2, dim=-1).values.sum(-1))
        outside = torch.ones_like(best, dtype=torch.int32).scatter(-1, _descending(best)[..., :top_groups], 0)
        outside = outside.repeat_interleave(x.shape[-1] // groups, -1).gather(-1, order)
        order = order.gather(-1, outside.sort(dim=-1, stable=True).indices)  # these last, in their order
    return order[..., :k]


def _descending(x: Tensor) -> Tensor:
    return x.sort(dim=-1, descending=True, stable=True).indices


def weigh(x: Tensor, indices: Tensor, scoring: str, renormalize: bool, scale: float) -> Tensor:
    """The weights of chosen experts."""
    chosen = x.gather(-1, indices)
    if scoring == "softmax":
        weights = torch.softmax(chosen, -1) if renormalize else torch.softmax(x, -1).gather(-1, indices)
    else:
        weights = torch.sigmoid(chosen)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights * scale


def router_topk_backward(
    grad_weights: Optional[Tensor],
    grad_indices: Optional[Tensor],
    logits: Tensor,
    indices: Tensor,
    scoring: str,
    renormalize: bool,
    scale: float,
    needs: str,
) -> Optional[Tensor]:
    """Gradient of `router_topk` with respect to logits.

    With p the softmax that the weights come from, over the chosen or over all, and g the gradient of the weights, 0 for experts
    that were not chosen: dlogits = scale * p * (g - sum(p * g)). The sigmoid's, with r = s / (sum(s) + 1e-20) of the chosen:
    scale * r * (1 - s) * (g - sum(r * g)); not renormalised: scale * s * (1 - s) * g.

    g - sum(p * g) is all cancellation where one p is nearly 1, or most g are equal. So the mean is taken off twice, which
    changes nothing but the rounding: the second time what the first one's rounding left. And g is counted from that of the
    largest p: where there is but one, nothing is left, however p was rounded.
    """
    if grad_weights is None:
        return None
    wide = torch.promote_types(logits.dtype, torch.float32)
    x, at = logits.to(wide), indices.long()
    g, chosen = grad_weights.to(wide), x.gather(-1, at)
    everywhere = scoring == "softmax" and not renormalize
    if everywhere:  # every expert has a share
        chosen, g = x, torch.zeros_like(x).scatter(-1, at, g)
    if scoring == "softmax":
        p = torch.softmax(chosen, -1)
        found = p * _centred(_centred(_from_largest(g, p)[0], p), p)
    else:
        s, slope = torch.sigmoid(chosen), torch.sigmoid(-chosen)  # not 1 - s, which has no digits where s is near 1
        if renormalize:
            total = s.sum(-1, keepdim=True) + TINY
            r = s / total
            g, at_largest = _from_largest(g, r)
            found = r * slope * (_centred(_centred(g, r), r) + at_largest * (TINY / total))  # r sums to 1 - TINY / total
        else:
            found = s * slope * g
    if not everywhere:
        found = torch.zeros_like(x).scatter(-1, at, found)
    return (found * scale).to(logits.dtype)


def _from_largest(g: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """g less that of the largest p, and that one, (..., 1)."""
    at_largest = g.gather(-1, p.argmax(-1, keepdim=True))
    return g - at_largest, at_largest


def _centred(g: Tensor, p: Tensor) -> Tensor:
    return g - (p * g).sum(-1, keepdim=True)


def check(
    logits: Tensor,
    k: int,
    scoring: str = "softmax",
    groups: Optional[int] = None,
    top_groups: Optional[int] = None,
    bias: Optional[Tensor] = None,
    renormalize: bool = True,
    scale: float = 1.0,
) -> None:
    """Raise InputError unless the arguments are what `router_topk` takes."""
    if logits.dim() == 0:
        way_out = "logits.reshape(1) for a single number"
        raise _error("LOGITS", "the shape of logits", tuple(logits.shape), "(..., E)", way_out)
    E = logits.shape[-1]
    if scoring not in SCORINGS:
        raise _error("SCORING", "scoring", scoring, f"one of {', '.join(SCORINGS)}", "softmax is usual, sigmoid is DeepSeek-V3's")
    if not 1 <= k <= E:
        raise _error("K", "k", k, f"1 to {E}, the experts in logits {tuple(logits.shape)}", "8 is usual")
    if bias is not None and bias.shape != logits.shape[-1:]:
        raise _error("BIAS", "the shape of bias", tuple(bias.shape), f"({E},), one number per expert", "bias=None for none")
    if bias is not None and not bias.is_floating_point():
        raise _error("BIAS", "the dtype of bias", bias.dtype, "that of logits, or float32", "bias.float()")
    if (groups is None) != (top_groups is None):
        limit = "both or neither"
        raise _error("GROUPS", "groups and top_groups", (groups, top_groups), limit, "groups=None, top_groups=None: no groups")
    if groups is None or top_groups is None:
        return
    if groups < 1 or E % groups or E // groups < 2:
        limit = f"a divisor of the {E} experts, at least two to a group"
        raise _error("GROUPS", "groups", groups, limit, "groups=None, top_groups=None: no groups")
    if not 1 <= top_groups <= groups:
        raise _error("TOP-GROUPS", "top_groups", top_groups, f"1 to {groups}, the groups", "a number in between")
    if k > top_groups * (E // groups):
        limit = f"{top_groups} groups of {E // groups} experts hold {top_groups * (E // groups)}"
        raise _error("K", "k", k, limit, "a smaller k or more top_groups")


def _error(code: str, what: str, value: object, limit: str, way_out: str) -> InputError:
    return InputError(f"ROUTER-{code}", f"router_topk: {what}", value=value, limit=limit, way_out=way_out)
