"""Plain-torch spellings that rms_norm replaces. Each takes (x, weight, eps) and equals the reference with the given offset."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kdk.ops
from kdk.patterns import ModulePattern, Trial


def functional(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """transformers' LlamaRMSNorm and the many copies of it."""
    hidden = x.to(torch.promote_types(x.dtype, torch.float32))
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return weight * (hidden * torch.rsqrt(variance + eps)).to(x.dtype)


def norm_over_root(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """transformers' GemmaRMSNorm: offset 1."""
    hidden = x.to(torch.promote_types(x.dtype, torch.float32))
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return (hidden * (1.0 + weight.to(hidden.dtype))).to(x.dtype)


SPELLINGS: tuple[tuple[Callable[..., Tensor], Mapping[str, float]], ...] = (
    (functional, {}),
    (llama, {}),
    (norm_over_root, {}),
    (gemma, {"offset": 1.0}),
)
"""(function, the scalar arguments with which the operator equals it)."""


# Models: modules that rms_norm replaces.
EPS = ("variance_epsilon", "eps", "norm_eps", "epsilon")


def _eps(module: Any) -> Any:
    for name in EPS:
        if hasattr(module, name):
            return getattr(module, name)
    return None


def forward_in_wider_dtype(self: Any, x: Tensor) -> Tensor:
    """Llama's: the normalised x times the weight, in the wider dtype of the two."""
    dtype = torch.promote_types(x.dtype, self.weight.dtype)
    return kdk.ops.rms_norm(x.to(dtype), self.weight.to(dtype), _eps(self))


def forward_in_input_dtype(self: Any, x: Tensor) -> Tensor:
    """The result has the dtype of x."""
    return kdk.ops.rms_norm(x, _weight(self, x), _eps(self))


def forward_in_weight_dtype(self: Any, x: Tensor) -> Tensor:
    """T5's: the result has the dtype of the weight."""
    return forward_in_wider_dtype(self, x).to(self.weight.dtype)


def forward_one_plus_weight(self: Any, x: Tensor) -> Tensor:
    """Gemma's: times 1 + weight; the result has the dtype of x."""
    return kdk.ops.rms_norm(x, _weight(self, x), _eps(self), 1.0)


def _weight(module: Any, x: Tensor) -> Tensor:
    weight = module.weight
    return weight if weight.dtype == x.dtype else weight.float()


def _refuse(module: Any) -> str | None:
    if not isinstance(module.weight, Tensor) or module.weight.dim() != 1 or module.weight.numel() == 0:
        return "its weight is not a vector"
    if getattr(module, "bias", None) is not None:
        return "it has a bias"
    if not isinstance(_eps(module), float):
        return f"its eps is {_eps(module)}"
    return None


def _trials(module: Any) -> list[Trial]:
    """Rows from where eps decides to large ones; equal and mixed dtypes."""
    size, smallest = module.weight.numel(), max(_eps(module), 1e-12) ** 0.5
    scales = torch.tensor([smallest, 1.0, 1e3]).reshape(1, 3, 1)
    trials = []
    for x_dtype, weight_dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        weight = torch.nn.Parameter(torch.randn(size).to(weight_dtype))
        x = (torch.randn(2, 3, size) * scales).to(x_dtype)
        trials += [Trial((x,), {"weight": weight}), Trial((x.reshape(1, 2, 3, size),), {"weight": weight})]
    return trials


MODULES = (
    ModulePattern(
        classes=r".*Norm(1d|2d|3d|Gated)?",
        attributes=("weight",),
        forwards=(forward_in_wider_dtype, forward_in_input_dtype, forward_in_weight_dtype, forward_one_plus_weight),
        trials=_trials,
        refuse=_refuse,
    ),
)
"""Norms of any library: which of the forwards it is, if any, is found by trial."""
