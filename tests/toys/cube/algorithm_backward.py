from torch import Tensor


def backward(grad: Tensor, x: Tensor, needs: str) -> Tensor:
    return (3 * grad).contiguous() * x.square()
