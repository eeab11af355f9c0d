"""Which choices of experts are right when scores are known to a relative tolerance, and the weights that belong to one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kdk_kernels.router_topk.reference import nan_first, weigh


def given(arguments: Mapping[str, Any], chosen: Mapping[str, Tensor]) -> tuple[Tensor]:
    """The weights of chosen experts, rounded once to the dtype of the logits."""
    logits = arguments["logits"]
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scoring, renormalize, scale = (arguments[name] for name in ("scoring", "renormalize", "scale"))
    return (weigh(x, chosen["indices"].long(), scoring, renormalize, scale).to(logits.dtype),)


def valid(arguments: Mapping[str, Any], chosen: Mapping[str, Tensor], tolerance: float) -> Tensor:
    """Per row, whether the indices are a right choice when every score may be off by a relative `tolerance`.

    Without a bias nothing is off: the logits themselves are ranked. Experts, or whole groups, whose inputs are equal bit for bit
    have equal scores however they are computed: of these the lower index comes first, exactly.
    """
    logits, bias, groups = arguments["logits"].double(), arguments["bias"], arguments["groups"]
    E, at = logits.shape[-1], chosen["indices"].long()
    lead, k = at.shape[:-1], at.shape[-1]
    x, at = logits.reshape(-1, E), at.reshape(-1, k)
    distinct = at.sort(-1).values
    legal = (at >= 0).all(-1) & (at < E).all(-1) & (distinct[:, 1:] > distinct[:, :-1]).all(-1)
    at = torch.where(legal[:, None], at, torch.arange(k))
    added = x.new_zeros(E) if bias is None else bias.double()
    scores = torch.softmax(x, -1) if arguments["scoring"] == "softmax" else torch.sigmoid(x)
    biased = nan_first(scores + added)
    # exp(x - max) turns the rounding of the difference, which grows with it, into a relative error.
    far = 1 + (x.amax(-1, keepdim=True) - x if arguments["scoring"] == "softmax" else x.abs())
    error = torch.nan_to_num(scores * far, nan=0.0, posinf=0.0, neginf=0.0) + torch.finfo(torch.float32).tiny
    off = torch.nan_to_num(tolerance * (error + added.abs()), nan=0.0, posinf=0.0)
    key, slack = (nan_first(x), torch.zeros_like(x)) if bias is None else (biased, off)
    # A NaN comes before all and ties with other NaN whatever their bias; with an infinity only where the logits are ranked.
    own = x if bias is None else x.clamp_max(torch.finfo(x.dtype).max)
    inputs = nan_first(own), torch.where(x.isnan(), 0.0, added)
    rows = _Rows(key, slack, inputs, at)
    right = rows.in_order()
    if groups is None:
        right &= ~rows.passed_over().any(-1)
    else:
        right &= _groups_are_right(rows, biased, off, groups, arguments["top_groups"])
    return (right & legal).reshape(lead)


def _surely_above(a: Tensor, off_a: Tensor, b: Tensor, off_b: Tensor) -> Tensor:
    return a - off_a > b + off_b


class _Rows:
    """Rows of experts and a choice of k in each. key, slack: what they are ranked by, and how far that may be off."""

    def __init__(self, key: Tensor, slack: Tensor, inputs: tuple[Tensor, Tensor], at: Tensor) -> None:
        self.key, self.slack, self.inputs, self.at = key, slack, inputs, at
        self.picked = torch.zeros_like(key, dtype=torch.bool).scatter(-1, at, True)
        self.of_picked = [t.gather(-1, at) for t in (key, slack, *inputs)]

    def _wrongly_before(self, i: int, others: list[Tensor], index: Tensor) -> Tensor:
        """Which others should have come before the expert in place i."""
        key, slack, *inputs = [t[:, i : i + 1] for t in self.of_picked]
        equal = (others[2] == inputs[0]) & (others[3] == inputs[1]) & (index < self.at[:, i : i + 1])
        return _surely_above(others[0], others[1], key, slack) | equal

    def in_order(self) -> Tensor:
        fine = torch.ones(len(self.at), dtype=torch.bool)
        for i in range(self.at.shape[1] - 1):
            later = [t[:, i + 1 :] for t in self.of_picked]
            fine &= ~self._wrongly_before(i, later, self.at[:, i + 1 :]).any(-1)
        return fine

    def passed_over(self) -> Tensor:
        """Experts that were not picked and should have been, before one that was."""
        found = torch.zeros_like(self.picked)
        everyone, index = [self.key, self.slack, *self.inputs], torch.arange(self.key.shape[1])
        for i in range(self.at.shape[1]):
            found |= self._wrongly_before(i, everyone, index)
        return found & ~self.picked


def _groups_are_right(rows: _Rows, biased: Tensor, off: Tensor, groups: int, top_groups: int) -> Tensor:
    """Whether some choice of groups is right and explains the picked experts.

    The groups of the picked experts were chosen. The others that were may hold nobody who was passed over: take the best of
    these. If that is wrong, every choice is: a worse group in place of a better one makes none of the comparisons easier.
    """
    size = biased.shape[1] // groups
    score, slack, twins = _group_scores(rows, biased, off, groups, size)
    index = torch.arange(groups)
    held = rows.picked.unflatten(-1, (groups, size)).any(-1)
    harmless = ~rows.passed_over().unflatten(-1, (groups, size)).any(-1)
    fine = (harmless | ~held).all(-1) & (held.sum(-1) <= top_groups)
    order = score.sort(dim=-1, descending=True, stable=True).indices
    class_ = torch.where(held, 0, torch.where(harmless, 1, 2)).gather(-1, order)
    order = order.gather(-1, class_.sort(dim=-1, stable=True).indices)[:, :top_groups]
    taken = torch.zeros_like(held).scatter(-1, order, True)
    fine &= (harmless | ~taken).all(-1)
    for i in range(groups):  # one that was taken against all that were not
        this = [t[:, i : i + 1] for t in (score, slack)]
        before = _surely_above(score, slack, *this) | (twins[:, i] & (index < i))
        fine &= ~(before & ~taken & taken[:, i : i + 1]).any(-1)
    return fine


def _group_scores(rows: _Rows, biased: Tensor, off: Tensor, groups: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of groups, how far they may be off, and which pairs of groups are equal whatever the rounding."""
    split = biased.unflatten(-1, (groups, size))
    apart = off.unflatten(-1, (groups, size))
    best = split.topk(2, dim=-1)
    score = nan_first(best.values.sum(-1))
    # Within the tolerance another pair may have been the best; then its score is within the tolerance, too.
    slack = 2 * apart.amax(-1) + torch.finfo(torch.float32).eps * torch.nan_to_num(score.abs(), posinf=0.0)
    inputs = [t.unflatten(-1, (groups, size)) for t in rows.inputs]
    same = [(t[:, :, None] == t[:, None]).all(-1) for t in inputs]
    return score, torch.where(score.isfinite(), slack, 0.0), same[0] & same[1]
