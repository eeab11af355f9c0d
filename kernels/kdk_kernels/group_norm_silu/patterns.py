"""Plain-torch spellings that group_norm_silu replaces. Each takes (x, groups, weight, bias, eps) and equals the reference."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kdk.ops
from kdk.patterns import ModulePattern, Trial


def functional(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.silu(F.group_norm(x, groups, weight, bias, eps))


def modules(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """nn.Sequential(GroupNorm, SiLU), as in OpenAI's UNet; diffusers' ResnetBlock2D calls the two one after the other."""
    both = nn.Sequential(nn.GroupNorm(groups, x.shape[1], eps), nn.SiLU())
    return torch.func.functional_call(both, {"0.weight": weight, "0.bias": bias}, (x,))


def times_sigmoid(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """CompVis' `nonlinearity`, of Stable Diffusion's first code."""
    h = F.group_norm(x, groups, weight, bias, eps)
    return h * torch.sigmoid(h)


def spelled_out(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Groups by reshaping."""
    h = x.reshape(x.shape[0], groups, -1)
    h = (h - h.mean(-1, keepdim=True)) / torch.sqrt(h.var(-1, unbiased=False, keepdim=True) + eps)
    column = (-1, *(1 for _ in x.shape[2:]))
    return F.silu(h.reshape(x.shape) * weight.reshape(column) + bias.reshape(column))


SPELLINGS: tuple[tuple[Callable[..., Tensor], Mapping[str, float]], ...] = (
    (functional, {}),
    (modules, {}),
    (times_sigmoid, {}),
    (spelled_out, {}),
)
"""(function, the scalar arguments with which the operator equals it)."""


# Models: the residual blocks of diffusers. Convolutions and projections are called as modules: they may have hooks or adapters.
def _norm_silu(norm: Any, x: Tensor) -> Tensor:
    weight, bias = (t if t.dtype == x.dtype else t.float() for t in (norm.weight, norm.bias))
    return kdk.ops.group_norm_silu(x, norm.num_groups, weight, bias, norm.eps)


def forward_resnet_block(self: Any, input_tensor: Tensor, temb: Any, *args: Any, **kwargs: Any) -> Tensor:
    """ResnetBlock2D's, with time added between the convolutions, or without."""
    hidden = self.conv1(_norm_silu(self.norm1, input_tensor))
    if self.time_emb_proj is not None:
        temb = self.time_emb_proj(temb if self.skip_time_act else self.nonlinearity(temb))[:, :, None, None]
    if temb is not None and self.time_embedding_norm == "default":  # the only other one here, "group", leaves time out
        hidden = hidden + temb
    hidden = self.conv2(self.dropout(_norm_silu(self.norm2, hidden)))
    if self.conv_shortcut is not None:
        # As the original in training: the gradient of its weight keeps the strides that DistributedDataParallel expects.
        input_tensor = self.conv_shortcut(input_tensor.contiguous() if self.training else input_tensor)
    return (input_tensor + hidden) / self.output_scale_factor  # type: ignore[no-any-return]


def _refuse(module: Any) -> str | None:
    """What the trial's small stand-ins do not show: other norms and activations, hooks on what is not called any more."""
    if module.upsample is not None or module.downsample is not None:
        return "it changes the size of the image between its norm and its convolution"
    if module.time_embedding_norm == "scale_shift":
        return f"its time_embedding_norm is {module.time_embedding_norm}"
    if type(module.nonlinearity).__name__ not in ("SiLU", "SiLUActivation"):
        return f"its activation is {type(module.nonlinearity).__name__}"
    for name in ("norm1", "norm2"):
        norm = getattr(module, name)
        if type(norm) is not nn.GroupNorm or not norm.affine:
            return f"{name} is not a GroupNorm with weights"
    for name in ("norm1", "norm2", "nonlinearity"):
        child = getattr(module, name)
        if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
            return f"there are hooks on {name}, which would not be called"
    return None


def _norm(groups: int, like: nn.GroupNorm, channels: int) -> nn.GroupNorm:
    norm = nn.GroupNorm(groups, channels, like.eps)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


def _trials(module: Any) -> list[Trial]:
    """With a projection of time where the module has one, and a convolution in the shortcut where it has one."""
    trials = []
    for dtype in (torch.float32, torch.bfloat16):
        timed, shortcut = module.time_emb_proj is not None, module.conv_shortcut is not None
        layers = {
            "norm1": _norm(2, module.norm1, 8),
            "conv1": nn.Conv2d(8, 12, 3, padding=1),
            "time_emb_proj": nn.Linear(6, 12) if timed else None,
            "norm2": _norm(3, module.norm2, 12),
            "dropout": nn.Identity(),
            "conv2": nn.Conv2d(12, 8, 3, padding=1),
            "conv_shortcut": nn.Conv2d(8, 8, 1) if shortcut else None,
        }
        temb = torch.randn(2, 6, dtype=dtype) if timed else None
        attributes = {name: layer if layer is None else layer.to(dtype) for name, layer in layers.items()}
        trials.append(Trial(((torch.randn(2, 8, 5, 4) * 3 + 1).to(dtype), temb), attributes))
    return trials


MODULES = (
    ModulePattern(
        classes=r"ResnetBlock2D",
        attributes=(
            "norm1", "conv1", "time_emb_proj", "norm2", "dropout", "conv2", "conv_shortcut", "nonlinearity", "skip_time_act",
            "time_embedding_norm", "output_scale_factor", "upsample", "downsample",
        ),
        forwards=(forward_resnet_block,),
        trials=_trials,
        refuse=_refuse,
    ),
)  # fmt: skip
