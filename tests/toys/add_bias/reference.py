from typing import Optional

from torch import Tensor


def add_bias(x: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """x + bias."""
    return x.view(x.shape) if bias is None else x + bias


def add_bias_backward(grad: Tensor, needs: str) -> tuple[Optional[Tensor], Optional[Tensor]]:
    needed = needs.split(",")
    return grad if "x" in needed else None, grad.sum(0) if "bias" in needed else None


def check(x: Tensor, bias: Optional[Tensor] = None) -> None: ...
