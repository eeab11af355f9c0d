"""Plain-torch spellings that linear_recurrence replaces. Each takes (a, b, h0) with time last but one and equals the reference."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kdk.patterns import LeftPattern


def step_by_step(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    """A loop over time, as in transformers' RecurrentGemma and the sequential mode of minGRU."""
    h, states = h0, []
    for t in range(b.shape[-2]):
        h = a[..., t, :] * h + b[..., t, :]
        states.append(h)
    return torch.stack(states, dim=-2)


def doubling(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    """The parallel prefix scan of Hillis and Steele, as PyTorch ports of S5 and of Mamba have it."""
    b = torch.cat((a[..., :1, :] * h0.unsqueeze(-2) + b[..., :1, :], b[..., 1:, :]), dim=-2)
    step = 1
    while step < b.shape[-2]:
        term = a[..., step:, :] * b[..., :-step, :] + b[..., step:, :]
        factor = a[..., step:, :] * a[..., :-step, :]
        a, b = torch.cat((a[..., :step, :], factor), dim=-2), torch.cat((b[..., :step, :], term), dim=-2)
        step *= 2
    return b


def from_the_end(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    """A loop against time: the second direction of bidirectional S5."""
    return step_by_step(a.flip(-2), b.flip(-2), h0).flip(-2)


SPELLINGS: tuple[tuple[Callable[..., Tensor], Mapping[str, bool]], ...] = (
    (step_by_step, {}),
    (doubling, {}),
    (from_the_end, {"reverse": True}),
)
"""(function, the scalar arguments with which the operator equals it)."""

LEFT = (LeftPattern(r".*Rglru", "its recurrence is a method between its gates: call kdk.ops.linear_recurrence in _rnn_scan"),)
