"""Plain-torch spellings that router_topk replaces. Each takes (logits, k, bias), returns (weights, indices) and equals the
reference in float64 with the given scalar arguments (without the bias where it takes none), which are its defaults."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kdk.ops
from kdk.patterns import ModulePattern, Trial

TINY = 1e-20


def softmax_first(logits: Tensor, k: int, bias: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' Mixtral and Qwen3-MoE: probabilities of all, the k largest, renormalised."""
    weights, indices = torch.topk(F.softmax(logits, -1), k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), indices


def softmax_last(logits: Tensor, k: int, bias: Tensor) -> tuple[Tensor, Tensor]:
    """gpt-oss: the k largest logits, then their softmax."""
    chosen, indices = torch.topk(logits, k, dim=-1)
    return F.softmax(chosen, -1), indices


def not_normalised(logits: Tensor, k: int, bias: Tensor) -> tuple[Tensor, Tensor]:
    """OLMoE and Qwen's models with norm_topk_prob=False."""
    weights, indices = torch.topk(F.softmax(logits, -1), k, dim=-1)
    return weights, indices


def deepseek_v3(logits: Tensor, k: int, bias: Tensor, groups: int = 4, top_groups: int = 3, scale: float = 2.5) -> tuple[Tensor, Tensor]:
    """transformers' DeepSeek-V3 and those like it: only experts of the best groups."""
    scores = logits.sigmoid()
    biased = scores + bias
    of_groups = biased.unflatten(-1, (groups, -1)).topk(2, dim=-1)[0].sum(-1)
    taken = torch.zeros_like(of_groups).scatter_(-1, of_groups.topk(top_groups, dim=-1)[1], 1)
    taken = taken.unsqueeze(-1).expand(*taken.shape, logits.shape[-1] // groups).reshape(logits.shape)
    indices = torch.topk(biased.masked_fill(~taken.bool(), float("-inf")), k, dim=-1)[1]
    weights = scores.gather(-1, indices)
    return weights / (weights.sum(-1, keepdim=True) + TINY) * scale, indices


SPELLINGS: tuple[tuple[Callable[..., tuple[Tensor, Tensor]], Mapping[str, Any]], ...] = (
    (softmax_first, {}),
    (softmax_last, {}),
    (not_normalised, {"renormalize": False}),
    (deepseek_v3, {"scoring": "sigmoid", "groups": 4, "top_groups": 3, "scale": 2.5}),
)
"""(function, the scalar arguments with which the operator equals it)."""


# Models: routers as modules of their own, which return logits, weights and indices. int64, as the experts behind them want.
def forward_softmax(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Qwen's, OLMoE's and gpt-oss': weights in the dtype of the logits."""
    logits = _logits(self, x)
    weights, indices = kdk.ops.router_topk(logits, self.top_k, renormalize=getattr(self, "norm_topk_prob", True))
    return logits, weights, indices.long()


def forward_softmax_in_float32(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mixtral's: weights in float32."""
    logits = _logits(self, x)
    weights, indices = kdk.ops.router_topk(logits.float(), self.top_k, renormalize=getattr(self, "norm_topk_prob", True))
    return logits, weights, indices.long()


def _logits(module: Any, x: Tensor) -> Tensor:
    return F.linear(x.reshape(-1, x.shape[-1]), module.weight, getattr(module, "bias", None))


def forward_deepseek_v3(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """DeepSeek-V3's and those like it: all in float32."""
    logits = F.linear(x.reshape(-1, x.shape[-1]).float(), self.weight.float())
    bias = self.e_score_correction_bias.detach().float()
    weights, indices = kdk.ops.router_topk(
        logits, self.top_k, "sigmoid", self.num_group, self.topk_group, bias, self.norm_topk_prob, self.routed_scaling_factor
    )
    return logits, weights, indices.long()


CORRECTIONS = ("num_group", "topk_group", "topk_method", "e_score_correction_bias", "routed_scaling_factor")


def _refuse_corrections(module: Any) -> str | None:
    """A limit to groups need not show on a small example: it must not be there."""
    found = [name for name in CORRECTIONS if hasattr(module, name)]
    return f"it has {', '.join(found)}" if found else None


def _trial(dtype: torch.dtype, experts: int, **more: Any) -> Trial:
    """Logits all different in every dtype, and so few experts of so many that torch.topk(sorted=False) gives them in order."""
    tokens = 32
    levels = (torch.arange(experts) - experts / 2) / 16
    weight = torch.stack([levels[torch.randperm(experts)] for _ in range(tokens)], 1)
    x = torch.eye(tokens) * torch.tensor([1.0, 2.0, 0.25, 1.0]).repeat(tokens // 4)[:, None]
    attributes = {"weight": torch.nn.Parameter(weight.to(dtype)), "top_k": 2, "hidden_dim": tokens, "num_experts": experts}
    return Trial((x.to(dtype),), {**attributes, **more})


def _softmax_trials(module: Any) -> list[Trial]:
    trials = []
    for dtype in (torch.float32, torch.bfloat16):
        more = {}
        if getattr(module, "bias", None) is not None:  # moves one expert past all others: in 16 bits nothing else stays exact
            more["bias"] = torch.nn.Parameter((torch.arange(128) == 5).to(dtype) * 64)
        trials.append(_trial(dtype, 128, **more))
    return trials


def _deepseek_trials(module: Any) -> list[Trial]:
    """As the module is, and with one group, where it matters how groups are scored."""
    experts = module.num_group * max(2, -(-128 // module.num_group))
    trials = []
    for dtype in (torch.float32, torch.bfloat16):
        for top_groups in {module.topk_group, 1}:
            bias = torch.randn(experts) / 8
            trials.append(_trial(dtype, experts, topk_group=top_groups, e_score_correction_bias=bias))
    return trials


MODULES = (
    ModulePattern(
        classes=r".*Top[kK]Router",
        attributes=("weight", "top_k"),
        forwards=(forward_softmax, forward_softmax_in_float32),
        trials=_softmax_trials,
        refuse=_refuse_corrections,
    ),
    ModulePattern(
        classes=r".*Top[kK]Router",
        attributes=(
            "weight", "top_k", "num_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "e_score_correction_bias"
        ),
        forwards=(forward_deepseek_v3,),
        trials=_deepseek_trials,
    ),
)  # fmt: skip
