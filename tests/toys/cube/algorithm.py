from torch import Tensor


def supports(target: str, x: Tensor) -> str | None:
    return f"{x.shape[-1]} columns; an even number is needed" if x.shape[-1] % 2 else None


def forward(x: Tensor) -> Tensor:
    return x.contiguous().pow(3)
