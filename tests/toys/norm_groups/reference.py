import torch
from torch import Tensor

from kdk.errors import InputError


def norm_groups(x: Tensor, groups: int) -> Tensor:
    """Subtract the mean of each group of channels."""
    return _centred(x, groups)


def norm_groups_backward(grad: Tensor, groups: int, needs: str) -> Tensor:
    return _centred(grad, groups)


def _centred(x: Tensor, groups: int) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(x.shape[0], groups, x.shape[1] // groups * x.shape[2:].numel())
    return (wide - wide.mean(-1, keepdim=True)).reshape(x.shape).to(x.dtype)


def check(x: Tensor, groups: int) -> None:
    if groups < 1 or x.shape[1] % groups:
        raise InputError("GROUPS", "norm_groups: groups", value=groups, limit=f"divides {x.shape[1]}", way_out="another number")
