"""kdk's own operators. Written by `python -m kdk_bench.stubs` from their references: change those, not this."""

from torch import Tensor

def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Add a block's result to the residual stream and normalise the sum for the next block."""

def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0, reduction: str = 'mean') -> Tensor:
    """Cross-entropy of a linear layer's logits, which are never stored: the loss of a language model's head."""

def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Root-mean-square normalisation over the last dimension."""

def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate the queries and the keys of attention by their positions."""

def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of a SwiGLU feed-forward block: y = silu(gate) * up, with silu(x) = x * sigmoid(x)."""
