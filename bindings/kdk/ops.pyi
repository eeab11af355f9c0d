"""kdk's own operators. Written by `python -m kdk_bench.stubs` from their references: change those, not this."""

from torch import Tensor

def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Add a block's result to the residual stream and normalise the sum for the next block."""

def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Root-mean-square normalisation over the last dimension."""

def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate the queries and the keys of attention by their positions."""

def sample_top_k_top_p(
    logits: Tensor,
    k: int | Tensor | None = None,
    p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    *,
    uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw a token per row from softmax(logits / temperature), cut by top-k, then top-p, then min-p."""

def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of a SwiGLU feed-forward block: y = silu(gate) * up, with silu(x) = x * sigmoid(x)."""
