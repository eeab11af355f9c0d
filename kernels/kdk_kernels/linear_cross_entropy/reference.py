"""linear_cross_entropy in plain torch: the semantics every kernel is checked against."""

import math
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from kdk.errors import InputError
from kdk.rounding import as_stored

REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: Optional[float] = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The loss of every row and the logarithm of its sum of exponentials; `reduced` documents the operator."""
    z = logits(x, weight, bias, softcap)
    largest = z.amax(-1, keepdim=True)
    # Of a row of -inf alone the sum is 0 and lse -inf; +inf and NaN spread, as in F.cross_entropy.
    largest = torch.where(largest == -math.inf, 0.0, largest)
    lse = (largest + (z - largest).exp().sum(-1, keepdim=True).log()).squeeze(-1)
    V = weight.shape[0]
    hit = z.gather(-1, target.long().clamp(0, V - 1).unsqueeze(-1)).squeeze(-1)
    hit = torch.where((target >= 0) & (target < V), hit, math.nan)
    total = z.sum(-1) if label_smoothing else None
    return loss_of(lse, hit, total, V, target == ignore_index, label_smoothing, z_loss), lse


def logits(x: Tensor, weight: Tensor, bias: Optional[Tensor], softcap: Optional[float]) -> Tensor:
    """(..., V) in float32, or float64."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    z = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return z if softcap is None else torch.tanh(z / softcap) * softcap


def autocasting(x: Tensor) -> bool:
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def loss_of(lse: Tensor, hit: Tensor, total: Optional[Tensor], V: int, ignored: Tensor, label_smoothing: float, z_loss: float) -> Tensor:
    """The loss, from the logit of the target and, with label smoothing, the sum of all logits."""
    loss = lse - (1 - label_smoothing) * hit
    if total is not None:
        loss = loss - label_smoothing / V * total
    if z_loss:
        loss = loss + z_loss * lse.square()
    return torch.where(ignored, 0.0, loss)


def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor],
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: Optional[float],
    z_loss: float,
    needs: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `linear_cross_entropy` with respect to x, weight and bias.

    The gradient of the logits, d = grad * (p * (1 + 2 z_loss lse) - (1 - label_smoothing) * onehot(target) - label_smoothing / V)
    with p = exp(z - lse), times 1 - (z / softcap)^2, is 0 in ignored rows and rounded to the dtype of x, as autograd has it
    between F.cross_entropy and F.linear. Then dx = d weight, dweight = d^T x, dbias = the sum of d over the rows.
    """
    needed, V = needs.split(","), weight.shape[0]
    # In another order than the forward's sums. In the same one z would have the roundings that lse has, and z - lse be more exact
    # than of anything that gets its lse from another implementation: no yardstick.
    z = logits(x.flip(-1), weight.flip(-1), bias, softcap)
    onehot = torch.arange(V, device=x.device) == target.unsqueeze(-1)
    d = gradient_of_logits(z, onehot, grad, target == ignore_index, lse, V, label_smoothing, softcap, z_loss)
    d = as_stored(d, x.dtype)
    rows = d.reshape(target.numel(), V)
    grad_x: Optional[Tensor] = None
    grad_weight: Optional[Tensor] = None
    grad_bias: Optional[Tensor] = None
    if "x" in needed:
        grad_x = (d @ weight.to(d.dtype)).to(x.dtype)
    if "weight" in needed:
        grad_weight = (rows.t() @ x.reshape(target.numel(), x.shape[-1]).to(d.dtype)).to(weight.dtype)
    if "bias" in needed and bias is not None:
        grad_bias = rows.sum(0).to(bias.dtype)
    return grad_x, grad_weight, grad_bias  # type: ignore[return-value]


def gradient_of_logits(
    z: Tensor,
    onehot: Tensor,
    grad: Tensor,
    ignored: Tensor,
    lse: Tensor,
    V: int,
    label_smoothing: float,
    softcap: Optional[float],
    z_loss: float,
) -> Tensor:
    """(..., columns of z), not yet rounded. No probability is more than 1, also where z and lse were rounded differently."""
    lse, grad = lse.unsqueeze(-1), grad.to(z.dtype).unsqueeze(-1)
    d = (z - lse).clamp(max=0.0).exp()
    if z_loss:
        d = d * (1 + 2 * z_loss * lse)
    d = torch.where(onehot, d - (1 - label_smoothing), d)
    if label_smoothing:
        d = d - label_smoothing / V
    if softcap is not None:
        d = d * (1 - (z / softcap).square())
    return torch.where(ignored.unsqueeze(-1), 0.0, d * grad)


def reduced(
    operator: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: Optional[float] = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of a linear layer's logits, which are never stored: the loss of a language model's head.

    z = x weight^T + bias, then softcap * tanh(z / softcap) if there is a softcap (Gemma 2), and for every row
    lse - (1 - label_smoothing) * z[target] - label_smoothing * mean(z) + z_loss * lse^2, where lse = log(sum(exp(z))).

    Semantics: torch.nn.functional.linear_cross_entropy without its `options` (input, linear_weight and linear_bias are x,
    weight and bias here), which is F.cross_entropy of F.linear. Not taken: class weights, class probabilities, losses of K
    dimensions. Added: softcap; z_loss (PaLM's); memory for a part of the logits only, with every reduction and label
    smoothing; torch.compile without a graph break; torch.func, through the reference; rows in any number of dimensions.
    The logits are float32 and not rounded to the dtype of x; their gradient is, before it is multiplied by weight and x.

    Args:
        x: (..., H), the rows; float32, bfloat16, float16 or float64, any strides.
        weight: (V, H), the dtype of x.
        target: (...), integers in [0, V) or ignore_index. Any other gives a loss of NaN, and
            gradients as if no class were right: look at the loss.
        bias: (V,), the dtype of x, or None.
        ignore_index: rows with this target have loss 0 and gradient 0, whatever is in them; but a NaN or an infinity in such a
            row of x makes the gradient of weight NaN, being 0 times that, as in torch.
        label_smoothing: in [0, 1].
        softcap: positive, or None.
        z_loss: weight of lse^2; not negative.
        reduction: "mean" over the rows that are not ignored (NaN if all are, as in F.cross_entropy; the gradients are then
            0), "sum", or "none".

    Returns:
        The loss, float32 (float64 for float64): a scalar, or (...) without a reduction. Under autocast x, weight and bias
        are cast to its dtype first.

    Raises:
        kdk.errors.InputError: sizes, dtypes or scalars that do not fit.

    Gradients: x, weight and bias, each only where it is needed; backward computes the logits again.
    """
    if reduction not in REDUCTIONS:
        limit = f"one of {', '.join(REDUCTIONS)}"
        raise InputError("LCE-REDUCTION", "linear_cross_entropy: reduction", value=repr(reduction), limit=limit, way_out="'mean' is usual")
    if autocasting(x) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    loss: Tensor = operator(x, weight, target, bias, ignore_index, label_smoothing, softcap, z_loss)
    if reduction == "none":
        return loss
    return loss.sum() / (target != ignore_index).sum().to(loss.dtype) if reduction == "mean" else loss.sum()


def check(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: Optional[float] = None,
    z_loss: float = 0.0,
) -> None:
    """Raise InputError unless the arguments are what `linear_cross_entropy` takes."""
    if x.dim() == 0:
        raise _wrong("X", "the shape of x", tuple(x.shape), "(..., H)", "x.reshape(1) for a single number")
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != x.shape[-1]:
        limit = f"(V, {x.shape[-1]}), V at least 1: a row of the last dimension of x for each class"
        raise _wrong("WEIGHT", "the shape of weight", tuple(weight.shape), limit, "the weight of torch.nn.Linear(H, V)")
    if target.shape != x.shape[:-1]:
        limit = f"{tuple(x.shape[:-1])}, the rows of x"
        raise _wrong("TARGET", "the shape of target", tuple(target.shape), limit, "a class for each row; target.reshape(x.shape[:-1])")
    if target.dtype not in (torch.int32, torch.int64):
        raise _wrong(
            "TARGET-DTYPE", "the dtype of target", target.dtype, "int64 or int32", "target.long(); class probabilities are not taken"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise _wrong("BIAS", "the shape of bias", tuple(bias.shape), f"({weight.shape[0]},), the rows of weight", "None for no bias")
    if not -(2**31) <= ignore_index < 2**31:
        raise _wrong("IGNORE", "ignore_index", ignore_index, "32 bits", "-100 is usual")
    if not 0 <= label_smoothing <= 1:
        raise _wrong("SMOOTHING", "label_smoothing", label_smoothing, "from 0 to 1", "0 for none")
    if softcap is not None and not 0 < softcap < math.inf:
        raise _wrong("SOFTCAP", "softcap", softcap, "positive and finite", "None for none")
    if not 0 <= z_loss < math.inf:
        raise _wrong("Z-LOSS", "z_loss", z_loss, "at least 0 and finite", "usual is 1e-4, 0 for none")


def _wrong(code: str, what: str, value: object, limit: str, way_out: str) -> InputError:
    return InputError(f"LCE-{code}", f"linear_cross_entropy: {what}", value=value, limit=limit, way_out=way_out)
