from torch import Tensor


def plain_clone(x: Tensor) -> Tensor:
    """A copy of x."""
    return x.clone()


def plain_clone_backward(grad: Tensor, needs: str) -> Tensor:
    return grad.clone()


def check(x: Tensor) -> None: ...
