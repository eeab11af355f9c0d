"""kdk's own operators. Written by `python -m kdk_bench.stubs` from their references: change those, not this."""

import torch
from torch import Tensor

def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Add a block's result to the residual stream and normalise the sum for the next block."""

def add_rms_norm_dynamic_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    dtype: torch.dtype = torch.int8,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a block's result to the residual stream, normalise the sum, and quantise it to 8 bits with a scale per row."""

def cumsum(x: Tensor) -> Tensor:
    """Sums over time from the start to every step, y_t = x_1 + ... + x_t, in float32."""

def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table by their numbers: rows[i] = table[index[i]]."""

def group_norm_silu(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Group normalisation over a group's channels and all pixels, then SiLU."""

def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = 'mean',
) -> Tensor:
    """Cross-entropy of a linear layer's logits, which are never stored: the loss of a language model's head."""

def linear_recurrence(a: Tensor, b: Tensor, h0: Tensor | None = None, reverse: bool = False) -> Tensor:
    """The linear recurrence h_t = a_t * h_{t-1} + b_t along time, for every channel by itself."""

def logcumsumexp(x: Tensor) -> Tensor:
    """Logarithms of sums over time from the start to every step, y_t = log(exp(x_1) + ... + exp(x_t))."""

def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Root-mean-square normalisation over the last dimension."""

def rms_norm_dynamic_quant(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    dtype: torch.dtype = torch.int8,
) -> tuple[Tensor, Tensor]:
    """Root-mean-square normalisation over the last dimension, quantised to 8 bits with a scale per row."""

def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate the queries and the keys of attention by their positions."""

def router_topk(
    logits: Tensor,
    k: int,
    scoring: str = 'softmax',
    groups: int | None = None,
    top_groups: int | None = None,
    bias: Tensor | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Routing of a mixture of experts: the k best experts of every token, and their weights."""

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

def scatter_add_rows(index: Tensor, rows: Tensor, num_rows: int, deterministic: bool = False) -> Tensor:
    """Rows added up where an index says: table[r] is the sum of the rows[i] with index[i] = r."""

def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of a SwiGLU feed-forward block: y = silu(gate) * up, with silu(x) = x * sigmoid(x)."""
