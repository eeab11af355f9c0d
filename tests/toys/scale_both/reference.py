from typing import Optional

from torch import Tensor


def scale_both(a: Tensor, b: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Both inputs times the factor."""
    return a * factor, b * factor


def scale_both_backward(
    grad_left: Optional[Tensor], grad_right: Optional[Tensor], factor: float, needs: str
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    needed = needs.split(",")
    grad_a = grad_left * factor if grad_left is not None and "a" in needed else None
    grad_b = grad_right * factor if grad_right is not None and "b" in needed else None
    return grad_a, grad_b


def check(a: Tensor, b: Tensor, factor: float) -> None: ...
