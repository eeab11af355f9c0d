"""sample_top_k_top_p in plain torch, by sorting: the semantics every kernel is checked against."""

from typing import Optional

import torch
from torch import Tensor

from kdk.errors import InputError

COLDEST = 2.0**-126  # the lowest temperature that is divided by; below it the largest logit alone has any weight


def sample_top_k_top_p(
    logits: Tensor,
    uniform: Tensor,
    k: Optional[Tensor] = None,
    p: Optional[Tensor] = None,
    min_p: Optional[Tensor] = None,
    temperature: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """Draw a token per row: the operator behind kdk.ops.sample_top_k_top_p, which says what it computes.

    Args:
        logits: (N, V), float32, bfloat16, float16 or float64, any strides.
        uniform: (N,), float32 or like logits, in [0, 1).
        k: (N,), int32 or int64; 0 keeps all, and so does what is out of range.
        p: (N,), float32 or like logits; 1 and more keeps all.
        min_p: (N,), float32 or like logits; 0 keeps all.
        temperature: (N,), float32 or like logits; 0 is greedy.

    Returns:
        token: (N,), int32.
        logprob: (N,), float32, or float64 for float64.

    Gradients: none.
    """
    scaled, _, kept, is_distribution = distribution(logits, k, p, min_p, temperature)
    running = kept.cumsum(-1)
    total = running[:, -1:]
    where = uniform if temperature is None else uniform.where(temperature > 0.0, 0.0)
    passed = (running <= where.unsqueeze(-1) * total).sum(-1, keepdim=True)
    last = (running < total).sum(-1, keepdim=True)  # where rounding makes uniform * total the total
    token = passed.minimum(last).clamp(max=logits.shape[-1] - 1)
    logprob = scaled.gather(-1, token) - total.log()
    return (
        token.squeeze(-1).where(is_distribution, -1).to(torch.int32),
        logprob.squeeze(-1).where(is_distribution, torch.nan),
    )


def distribution(
    logits: Tensor, k: Optional[Tensor], p: Optional[Tensor], min_p: Optional[Tensor], temperature: Optional[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(N, V): logits relative to the largest, by temperature; their weights; these where they are kept. (N,): whether there are any."""
    f = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = f - f.amax(-1, keepdim=True)
    if temperature is not None:
        scaled = scaled / temperature.to(f.dtype).clamp(min=COLDEST).unsqueeze(-1)
    weight = scaled.exp()
    least = least_of_top_k(f, k)
    kept = weight.where(f >= least, 0.0)
    if p is not None:
        kept = kept.where((f >= least_of_top_p(f, kept, p)) | (p.unsqueeze(-1) >= 1.0), 0.0)
    if min_p is not None:
        kept = kept.where(weight >= min_p.unsqueeze(-1), 0.0)
    return scaled, weight, kept, weight.sum(-1) > 0.0


def least_of_top_k(f: Tensor, k: Optional[Tensor]) -> Tensor:
    """The smallest logit (N, 1) that top-k keeps."""
    if k is None:
        return torch.full_like(f[:, :1], -torch.inf)
    V = f.shape[-1]
    last = k.where((k > 0) & (k < V), V) - 1
    return f.sort(-1, descending=True).values.gather(-1, last.unsqueeze(-1).long())


def least_of_top_p(f: Tensor, weight: Tensor, p: Tensor) -> Tensor:
    """The smallest logit (N, 1) that top-p keeps of tokens with these weights."""
    ordered, order = f.sort(-1, descending=True)
    running = weight.gather(-1, order).cumsum(-1)
    above = torch.cat((torch.zeros_like(running[:, :1]), running[:, :-1]), -1)
    needed = (above < p.unsqueeze(-1) * running[:, -1:]).sum(-1, keepdim=True)
    return ordered.gather(-1, needed.clamp(min=1) - 1)


def check(
    logits: Tensor,
    uniform: Tensor,
    k: Optional[Tensor] = None,
    p: Optional[Tensor] = None,
    min_p: Optional[Tensor] = None,
    temperature: Optional[Tensor] = None,
) -> None:
    """Raise InputError unless the arguments are what `sample_top_k_top_p` takes."""
    if logits.dim() != 2 or logits.shape[1] == 0:
        limit, way_out = "(N, V), V at least 1", "logits[:, -1] for the last token of each sequence"
        problem = "sample_top_k_top_p: the shape of logits"
        raise InputError("SAMPLE-LOGITS", problem, value=tuple(logits.shape), limit=limit, way_out=way_out)
    rows = logits.shape[0]
    for name, t in (("logits", logits), ("uniform", uniform), ("p", p), ("min_p", min_p), ("temperature", temperature)):
        if t is not None and not t.is_floating_point():
            problem, way_out = f"sample_top_k_top_p: the dtype of {name}", f"{name}.float()"
            raise InputError("SAMPLE-DTYPE", problem, value=t.dtype, limit="floating point", way_out=way_out)
    for name, t in (("uniform", uniform), ("k", k), ("p", p), ("min_p", min_p), ("temperature", temperature)):
        if t is not None and (t.dim() != 1 or t.shape[0] != rows):
            limit = f"({rows},), a number for every row of logits"
            way_out = f"torch.full(({rows},), ...) for the same in all rows; of uniform kdk.random.uniform(seed, {rows})"
            problem = f"sample_top_k_top_p: the shape of {name}"
            raise InputError("SAMPLE-ROWS", problem, value=tuple(t.shape), limit=limit, way_out=way_out)
