from torch import Tensor


def times_table(x: Tensor, table: Tensor) -> Tensor:
    """x * table."""
    return x * table


def times_table_backward(grad: Tensor, table: Tensor, needs: str) -> Tensor:
    return grad * table


def check(x: Tensor, table: Tensor) -> None: ...
