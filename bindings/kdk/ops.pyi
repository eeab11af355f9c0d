"""kdk's own operators. Written by `python -m kdk_bench.stubs` from their references: change those, not this."""

import torch
from torch import Tensor

def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Add a block's result to the residual stream and normalise the sum for the next block."""

def add_rms_norm_dynamic_quant(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor, Tensor]:
    """Add a block's result to the residual stream, normalise the sum, and quantise it to 8 bits with a scale per row."""

def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Root-mean-square normalisation over the last dimension."""

def rms_norm_dynamic_quant(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Root-mean-square normalisation over the last dimension, quantised to 8 bits with a scale per row."""

def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate the queries and the keys of attention by their positions."""

def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of a SwiGLU feed-forward block: y = silu(gate) * up, with silu(x) = x * sigmoid(x)."""
