from typing import Any

import torch
from torch import Tensor


def quantise(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Rows of sin(x) * x as small numbers times a scale."""
    wide = values({"x": x})
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = wide.abs().amax(-1) / largest
    q = wide / torch.where(scale == 0, 1.0, scale)[..., None]
    if dtype == torch.int8:
        q = q.round()
    return q.clamp(-largest, largest).to(dtype), scale


def values(arguments: dict[str, Any]) -> Tensor:
    x = arguments["x"].to(torch.promote_types(arguments["x"].dtype, torch.float32))
    return x * x.sin()


def check(x: Tensor, dtype: torch.dtype = torch.int8) -> None: ...
