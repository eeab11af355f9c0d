"""kdk.ops.sample_top_k_top_p: what users call."""

from collections.abc import Callable

import torch
from torch import Tensor

from kdk.errors import InputError

HOTTEST = 1e30  # whose inverse is no denormal number, which chips take for 0


def sample_top_k_top_p(
    operator: Callable[..., tuple[Tensor, Tensor]],
    logits: Tensor,
    k: int | Tensor | None = None,
    p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    *,
    uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw a token per row from softmax(logits / temperature), cut by top-k, then top-p, then min-p.

    The randomness is an argument: with the same `uniform` every implementation draws the same token. Each filter is one number,
    or one per row, or None. With weight = exp((logit - largest logit) / temperature), a token stays if

        top-k   its logit is at least the k-th largest: all that equal the k-th stay;
        top-p   the tokens that top-k leaves and whose logits are larger have together less than the share p of the weight of
                all that top-k leaves: the fewest tokens that reach p, and all that equal the last of them; at least one;
        min-p   its weight is at least min_p: its probability is at least min_p times the largest.

    The draw is by inversion in the order of the vocabulary: the first token at which the running sum of kept weights exceeds
    uniform * their total.

    The order of the filters is that of transformers. Like its top-k and vLLM's, this one keeps all equals of the k-th; their
    top-p cuts among equal logits by position. vLLM applies min-p first: the same, unless what min-p removes counts for p.

    Computed in float32 (float64 for float64). top-k compares logits and is exact. Elsewhere the token is that of exact
    arithmetic, apart from rows in which rounding decides: a share of the running sum lies within 2^-16 of p or of `uniform`, or a
    weight, relative to itself, within as much of min_p.

    Args:
        logits: (N, V), float32, bfloat16, float16 or float64, any strides; -inf excludes a token.
        k: a number, or (N,) int32 or int64; what is not in 1 ... V - 1 keeps all (vLLM's 0 and -1).
        p: a number, or (N,) float32 or like logits; from 0, the largest logit and its equals, to 1, which keeps all.
        min_p: a number, or (N,) float32 or like logits, from 0, which keeps all, to 1.
        temperature: a number, or (N,) float32 or like logits, from 0 to 1e30. 0 is greedy, whatever `uniform` is: the first of
            the largest logits.
        uniform: (N,), float32 (or like logits, which is coarse in 16 bits), in [0, 1): kdk.random.uniform(seed, N).

    Returns:
        token: (N,), int32.
        logprob: (N,), float32 (float64 for float64): log-probability of the token in the distribution that it was drawn from,
            tempered, cut and renormalised: vLLM's processed_logprobs, transformers' compute_transition_scores of its scores with
            normalize_logits. (The model's own is torch.log_softmax(logits, -1) at the token.)
        A row with a NaN or +inf, or of -inf alone, is no distribution: token -1 and logprob NaN.

    Raises:
        kdk.errors.InputError: shapes, dtypes or numbers that do not fit. Values in tensors are not looked at: what
            is drawn with one out of its range is undefined.

    Gradients: none.
    """
    rows, V = logits.shape[0] if logits.dim() else 0, logits.shape[-1] if logits.dim() else 0
    if isinstance(k, Tensor):
        k = k.where((k > 0) & (k < V), 0)
    elif k is not None:
        _number("k", k)
        k = torch.full((rows,), k, dtype=torch.int32, device=logits.device) if 0 < k < V else None
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if not isinstance(p, Tensor) and p is not None:
        _within("p", p, 1.0, "1 keeps all")
        p = torch.full((rows,), p, dtype=dtype, device=logits.device) if p < 1.0 else None
    if not isinstance(min_p, Tensor) and min_p is not None:
        _within("min_p", min_p, 1.0, "0 keeps all")
        min_p = torch.full((rows,), min_p, dtype=dtype, device=logits.device) if min_p > 0.0 else None
    degrees: Tensor | None
    if isinstance(temperature, Tensor):
        degrees = temperature
    else:
        _within("temperature", temperature, HOTTEST, "0 is greedy, 1 leaves the logits as they are")
        degrees = torch.full((rows,), temperature, dtype=dtype, device=logits.device) if temperature != 1.0 else None
    return operator(logits, uniform, k, p, min_p, degrees)


def _within(name: str, value: float, most: float, way_out: str) -> None:
    _number(name, value)
    if not 0.0 <= value <= most:
        raise InputError("SAMPLE-NUMBER", f"sample_top_k_top_p: {name}", value=value, limit=f"0 to {most:g}", way_out=way_out)


def _number(name: str, value: object) -> None:
    if value is None or isinstance(value, str):
        way_out = "1.0 leaves the logits as they are" if name == "temperature" else "None for no such filter"
        raise InputError("SAMPLE-NUMBER", f"sample_top_k_top_p: {name}", value=repr(value), limit="a number or a tensor", way_out=way_out)
