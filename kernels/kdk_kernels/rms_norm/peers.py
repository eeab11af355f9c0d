"""rms_norm by others."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from kdk.peers import Peer


def functional(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def liger(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found]

    # "gemma" casts as kdk's reference does: all in float32, one rounding. In place it would write into the gradient.
    return LigerRMSNormFunction.apply(x, weight, eps, offset, "gemma", False)  # type: ignore[no-any-return]


def _no_offset(x: Any, weight: Any, eps: float, offset: float) -> str | None:
    return "it has no offset" if offset else None


PEERS = (
    Peer("F.rms_norm", functional, refuse=_no_offset),
    Peer("liger-kernel", liger, package="liger-kernel", platforms=("cuda",)),
)
