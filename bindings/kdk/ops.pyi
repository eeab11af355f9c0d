"""kdk's own operators. Written by `python -m kdk_bench.stubs` from their references: change those, not this."""

from torch import Tensor

def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Add a block's result to the residual stream and normalise the sum for the next block."""

def cumsum(x: Tensor) -> Tensor:
    """Sums over time from the start to every step, y_t = x_1 + ... + x_t, in float32."""

def linear_recurrence(a: Tensor, b: Tensor, h0: Tensor | None = None, reverse: bool = False) -> Tensor:
    """The linear recurrence h_t = a_t * h_{t-1} + b_t along time, for every channel by itself."""

def logcumsumexp(x: Tensor) -> Tensor:
    """Logarithms of sums over time from the start to every step, y_t = log(exp(x_1) + ... + exp(x_t))."""

def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Root-mean-square normalisation over the last dimension."""

def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate the queries and the keys of attention by their positions."""

def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of a SwiGLU feed-forward block: y = silu(gate) * up, with silu(x) = x * sigmoid(x)."""
