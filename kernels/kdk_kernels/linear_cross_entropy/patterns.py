"""Plain-torch spellings that linear_cross_entropy replaces. Each takes (x, weight, target) and equals it with the given arguments.

`kdk.patch` lets causal language models of transformers be trained without their logits: `forward(labels=...)` of a model in
training mode runs as it is written, with `patterns_logits.Logits` in the place of the logits. In evaluation mode, without labels, and
under torch.compile, which traces the forward and fuses what it can, it makes them as before.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kdk.patterns import ModulePattern, Trial, inlined
from kdk_kernels.linear_cross_entropy.patterns_logits import with_deferred_head


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


HEAD = "lm_head"
COMPILED = "torch.compile traces the forward of a language model, which makes its logits"


def forward_causal_lm(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward, on a head that defers while a loss is asked for in training."""
    original = type(self).forward
    labels = kwargs["labels"] if "labels" in kwargs else dict(zip(_parameters(original)[1:], args)).get("labels")
    if not self.training or labels is None:
        return original(self, *args, **kwargs)
    reason = COMPILED if torch.compiler.is_compiling() else more_than_linear(getattr(self, HEAD))
    if reason:
        inlined("linear_cross_entropy", reason)
        return original(self, *args, **kwargs)
    return original(with_deferred_head(self, HEAD), *args, **kwargs)


def more_than_linear(head: Any) -> str | None:
    """Why a head has to be called: FSDP and tensor parallelism, adapters and hooks may come after patching."""
    if type(head) is not torch.nn.Linear:
        return f"its {HEAD} is {type(head).__name__}, not torch.nn.Linear"
    if "forward" in head.__dict__:
        return f"somebody else has set the forward of its {HEAD}"
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
        return f"there are hooks on its {HEAD}"
    return None


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _refuse(module: Any) -> str | None:
    """A head that is more than its product; the trial finds a loss that is not its cross-entropy."""
    reason = more_than_linear(getattr(module, HEAD))
    if reason:
        return reason
    return None if "labels" in _parameters(type(module).forward) else "its forward takes no labels"


class Body(torch.nn.Module):
    """In the place of a model's body: returns given hidden states, and None for everything else that its forward reads."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return Outputs(self.hidden)


class Outputs:
    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


def _trials(module: Any) -> list[Trial]:
    """Small hidden states and a small head; some labels are ignored. Its scales and softcap are the module's own."""
    rows, H, V = 7, 16, 48
    config = copy.deepcopy(module.config)
    for name, value in {"vocab_size": V, "return_dict": False, "output_router_logits": False}.items():
        setattr(config, name, value)
    trials = []
    for dtype in (torch.float32, torch.bfloat16):
        head = torch.nn.Linear(H, V, bias=getattr(module, HEAD).bias is not None, dtype=dtype)
        with torch.no_grad():
            head.weight.normal_(0, 1)
        labels = torch.randint(0, V, (2, rows))
        labels[:, 2:4] = -100
        given = {"input_ids": labels.clamp(min=0), "labels": labels}
        names = _parameters(type(module).forward)[1:]
        args = tuple([given.get(name) for name in names[: names.index("labels") + 1]])
        body = Body(torch.randn(2, rows, H).to(dtype))
        trials.append(Trial(args, {"model": body, HEAD: head, "config": config, "vocab_size": V}))
    return trials


MODULES = (
    ModulePattern(
        classes=r".*ForCausalLM",
        attributes=("model", HEAD, "config"),
        forwards=(forward_causal_lm,),
        trials=_trials,
        refuse=_refuse,
        around=True,
        note="in training; logits are made if used",
    ),
)
