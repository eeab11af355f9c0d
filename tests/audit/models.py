"""Small models that the tests of the audit capture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def llama(layers: int = 2) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A Llama of transformers with its own loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, vocab_size=128
    )
    ids = torch.randint(0, 128, (2, 16))
    return LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids}


def llama_lengths() -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """One model, three lengths; 9 and 12 share a power of two."""
    model, _, _ = llama(1)
    for length in (9, 12, 24):
        ids = torch.randint(0, 128, (2, length))
        yield model, (), {"input_ids": ids, "labels": ids}


class Median(nn.Module):
    """TorchTPU has no median, torch_xla sends it to the host; .item() makes the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        y = y - y.median()
        chosen = y[y > 0]
        return y.sum() * float(chosen.max().item())


def median() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    return Median(), (torch.randn(4, 8),), {}


def ok() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A factory whose name between colons is an emoji's in rich."""
    return nn.Linear(8, 8), (torch.randn(2, 8),), {}


class OnCuda(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape, device="cuda")
        return x.cuda() * mask.to("cuda:0")


def on_cuda() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return OnCuda().cuda(), (torch.randn(3),), {}


class MishLike(nn.Module):
    """A formula that no operator has: x * exp(-|x|) + x * sigmoid(x)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.exp(-x.abs()) + x * torch.sigmoid(x)


def mish_like() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model = nn.Sequential(nn.Linear(8, 16), MishLike(), nn.Linear(16, 16), MishLike(), nn.Linear(16, 4))
    return model, (torch.randn(4, 8),), {}


class Scores(nn.Module):
    """Attention written out with a bias, then a median per row."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(q @ k.transpose(-1, -2) * 0.25 + bias, -1) @ v
        return y.median(-1).values


def scores() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    return Scores(), (torch.randn(2, 3, 5, 16), torch.randn(2, 3, 7, 16), torch.randn(2, 3, 7, 16), torch.randn(1, 1, 5, 7)), {}
