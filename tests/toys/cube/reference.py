from torch import Tensor


def cube(x: Tensor) -> Tensor:
    """x * x * x."""
    return x * x * x


def cube_backward(grad: Tensor, x: Tensor, needs: str) -> Tensor:
    return 3 * grad * x * x


def check(x: Tensor) -> None: ...
