from torch import Tensor


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """The order of every row, and where its largest value stands."""
    return x.argsort(-1), x.argmax(-1)


def check(x: Tensor) -> None: ...
