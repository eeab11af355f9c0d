"""group_norm_silu by others."""

import torch.nn.functional as F
from torch import Tensor

from kdk.peers import Peer


def functional(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """torch's two, one after the other."""
    return F.silu(F.group_norm(x, groups, weight, bias, eps))


PEERS = (Peer("F.group_norm, F.silu", functional),)
