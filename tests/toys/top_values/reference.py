import torch
from torch import Tensor

from kdk.errors import InputError


def top_values(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of every row."""
    values, indices = x.topk(k, -1)
    return values, indices.to(torch.int32)


def top_values_backward(grad: Tensor, x: Tensor, indices: Tensor, needs: str) -> Tensor:
    return torch.zeros_like(x).scatter(-1, indices.long(), grad)


def check(x: Tensor, k: int) -> None:
    if not 0 <= k <= x.shape[-1]:
        raise InputError("TOP-K", "top_values: k", value=k, limit=f"0 to {x.shape[-1]}", way_out="a smaller k")
