"""kdk.patch on mixtures of experts: routers become router_topk, loss and all gradients stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import kdk
from kdk_kernels.router_topk.patterns import _trial

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 50,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 8},
    "Mixtral": {"num_local_experts": 8},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "DeepseekV3": {**LATENT, **GROUPS},
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
}
TOKENS = torch.randint(3, 50, (2, 8), generator=torch.Generator().manual_seed(0))


def build(family: str, **settings: Any) -> nn.Module:
    """A small model with weights that are all random, the routers' correction bias too."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.1 * torch.randn_like(buffer)
    return model


def loss_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    model = build(family, **FAMILIES[family])
    loss, before = loss_and_gradients(model)
    routers = [row for row in kdk.patch(model).rows if row.cls.lower().endswith("topkrouter")]
    assert routers and all("router_topk" in row.operators for row in routers)
    with kdk.record() as ran:
        after_loss, after = loss_and_gradients(model)
    assert ran.calls("router_topk") == ran.calls("router_topk", "backward") == len(routers)
    torch.testing.assert_close(after_loss, loss, rtol=1e-6, atol=0)
    assert before.keys() == after.keys()
    for name, grad in before.items():
        torch.testing.assert_close(after[name], grad, rtol=0, atol=2e-5 * grad.abs().max().item(), msg=name)


def test_a_router_that_limits_groups_by_their_maximum_is_left() -> None:
    """DeepSeek-V2's: on a small example a softmax router gives the same."""
    model = build("DeepseekV2", **LATENT, **GROUPS, topk_method="group_limited_greedy")
    rows = [row for row in kdk.patch(model).left if row.cls == "DeepseekV2TopkRouter"]
    assert rows and "it has num_group, topk_group, topk_method" in rows[0].reason


class ByMaximum(nn.Module):
    """DeepSeek-V3's router, but for the score of a group."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8))
        self.top_k, self.num_experts, self.hidden_dim, self.num_group, self.topk_group = 3, 16, 8, 4, 2
        self.norm_topk_prob, self.routed_scaling_factor = True, 1.0
        self.register_buffer("e_score_correction_bias", torch.zeros(16))

    def group_scores(self, scores: Tensor) -> Tensor:
        return scores.amax(-1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x.reshape(-1, self.hidden_dim).float() @ self.weight.float().T
        scores = logits.sigmoid()
        biased = (scores + self.e_score_correction_bias).unflatten(-1, (self.num_group, -1))
        taken = self.group_scores(biased).topk(self.topk_group, -1).indices
        outside = torch.ones(biased.shape[:2], dtype=torch.bool).scatter(-1, taken, False)
        indices = biased.masked_fill(outside[:, :, None], float("-inf")).flatten(1).topk(self.top_k, -1).indices
        weights = scores.gather(1, indices)
        return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20), indices


class ByTwo(ByMaximum):
    def group_scores(self, scores: Tensor) -> Tensor:
        return scores.topk(2, -1).values.sum(-1)


def test_how_groups_are_scored_shows_in_a_trial() -> None:
    module = nn.ModuleDict({"max": type("MaxTopkRouter", (ByMaximum,), {})(), "two": type("TwoTopkRouter", (ByTwo,), {})()})
    rows = {row.path: row for row in kdk.patch(module).rows}
    assert rows["two"].operators == ("router_topk",)
    assert "the results differ" in rows["max"].reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_trial_do_not_tie(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    trial = _trial(dtype, 128)
    logits = trial.args[0] @ trial.attributes["weight"].T
    assert all(row.unique().numel() == 128 for row in logits)
