"""Plain-torch spellings that silu_and_mul replaces. Each takes (gate, up) and equals the reference in float64."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kdk.ops
from kdk.patterns import LeftPattern, ModulePattern, Trial


def functional(gate: Tensor, up: Tensor) -> Tensor:
    """transformers' LlamaMLP and the many gated MLPs like it."""
    return F.silu(gate) * up


def times_sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    """Models that spell swish out."""
    return gate * torch.sigmoid(gate) * up


def swapped(gate: Tensor, up: Tensor) -> Tensor:
    return up * F.silu(gate)


def halves(gate: Tensor, up: Tensor) -> Tensor:
    """One fused gate-and-up projection, as in transformers' Phi3MLP: the operator takes the two halves as they are."""
    first, second = torch.cat((gate, up), dim=-1).chunk(2, dim=-1)
    return second * F.silu(first)


SPELLINGS: tuple[tuple[Callable[..., Tensor], dict[str, Any]], ...] = (
    (functional, {}),
    (times_sigmoid, {}),
    (swapped, {}),
    (halves, {}),
)
"""(function, the scalar arguments with which the operator equals it)."""


# Models: the gated feed-forward blocks that silu_and_mul replaces. Projections are called as modules: they may have a bias,
# hooks, adapters or quantised weights.
def forward_gate_and_up(self: Any, x: Tensor) -> Tensor:
    """Llama's: a projection for the gate, one for the other half."""
    return self.down_proj(kdk.ops.silu_and_mul(self.gate_proj(x), self.up_proj(x)))


def forward_gate_up(self: Any, x: Tensor) -> Tensor:
    """Phi-3's: one projection, the gate first."""
    gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
    return self.down_proj(kdk.ops.silu_and_mul(gate, up))


def _refuse(module: Any) -> str | None:
    """An activation that is a module has to be SiLU by name too: the trial knows only the values that it draws."""
    for name in ("act_fn", "activation_fn", "act"):
        activation = getattr(module, name, None)
        if isinstance(activation, nn.Module) and type(activation).__name__ not in ("SiLU", "SiLUActivation"):
            return f"its activation is {type(activation).__name__}"
    return None


def _trials(names: dict[str, tuple[int, int]]) -> list[Trial]:
    """Small projections of these sizes; rows from small to so large that a limit on the activation shows."""
    trials = []
    scales = torch.tensor([0.1, 1.0, 30.0, 1e3]).reshape(1, 4, 1)
    for dtype, bias in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        layers = {name: nn.Linear(*size, bias=bias, dtype=dtype) for name, size in names.items()}
        trials.append(Trial(((torch.randn(2, 4, 8) * scales).to(dtype),), layers))
    return trials


MODULES = (
    ModulePattern(
        classes=r".*(MLP|Mlp|FeedForward|FFN)",
        attributes=("gate_proj", "up_proj", "down_proj"),
        forwards=(forward_gate_and_up,),
        trials=lambda module: _trials({"gate_proj": (8, 12), "up_proj": (8, 12), "down_proj": (12, 8)}),
        refuse=_refuse,
    ),
    ModulePattern(
        classes=r".*(MLP|Mlp|FeedForward|FFN)",
        attributes=("gate_up_proj", "down_proj"),
        forwards=(forward_gate_up,),
        trials=lambda module: _trials({"gate_up_proj": (8, 24), "down_proj": (12, 8)}),
        refuse=_refuse,
    ),
)
LEFT = (LeftPattern(r".*Experts", "its experts run as one grouped product, which no operator replaces"),)
