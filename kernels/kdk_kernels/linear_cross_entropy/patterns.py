"""Plain-torch spellings that linear_cross_entropy replaces. Each takes (x, weight, target) and equals it with the given arguments.

`kdk.patch` replaces none of them: a causal language model stores its logits in its own forward and returns them, and its loss
reads them afterwards. It names such a model, and what to call in a training loop.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kdk.patterns import LeftPattern


def functional(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.linear_cross_entropy(x, weight, target)


def linear_then_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def causal_lm(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """transformers' lm_head and ForCausalLMLoss, after the labels have been shifted."""
    logits = F.linear(x, weight).float()
    return F.cross_entropy(logits.view(-1, weight.shape[0]), target.view(-1), ignore_index=-100, reduction="mean")


def gemma(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """transformers' Gemma 2: final_logit_softcapping."""
    return F.cross_entropy((torch.tanh(F.linear(x, weight) / 30.0) * 30.0).float(), target)


def summed_by_hand(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = x @ weight.t()
    return (logits.logsumexp(-1) - logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)).sum()


def smoothed(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target, label_smoothing=0.1)


def with_z_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """PaLM's, as T5X and OLMo write it."""
    logits = F.linear(x, weight)
    return F.cross_entropy(logits, target) + 1e-4 * logits.logsumexp(-1).square().mean()


SPELLINGS: tuple[tuple[Callable[..., Tensor], Mapping[str, Any]], ...] = (
    (functional, {}),
    (linear_then_loss, {}),
    (causal_lm, {}),
    (gemma, {"softcap": 30.0}),
    (summed_by_hand, {"reduction": "sum"}),
    (smoothed, {"label_smoothing": 0.1}),
    (with_z_loss, {"z_loss": 1e-4}),
)
"""(function, the arguments of kdk.ops.linear_cross_entropy with which it equals it)."""


LEFT = (
    LeftPattern(
        r".*ForCausalLM",
        # In training: kdk.ops.linear_cross_entropy(hidden, lm_head.weight, shifted labels) on the last hidden state.
        "not linear_cross_entropy: its forward returns the logits",
    ),
)
