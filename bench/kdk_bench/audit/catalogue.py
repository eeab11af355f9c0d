"""Formulas that models spell out and no registered operator fills. Each is left out as soon as an operator has its name; but for
parts (see `Chain`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kdk_bench.audit.chains import Chain


def gelu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """GeGLU: gelu(gate) * up."""
    return F.gelu(gate) * up


def gelu_tanh_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Gemma's GeGLU, with the approximation by tanh."""
    return F.gelu(gate, approximate="tanh") * up


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale) v, written out."""
    return torch.softmax(q @ k.transpose(-1, -2) * scale, -1) @ v


def attention_with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale + bias) v: a mask, a window or relative positions are the bias."""
    return torch.softmax(q @ k.transpose(-1, -2) * scale + bias, -1) @ v


def attention_with_bias_unscaled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """T5's: no scale."""
    return torch.softmax(q @ k.transpose(-1, -2) + bias, -1) @ v


def attention_with_softcap(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, cap: float) -> Tensor:
    """Gemma 2's: tanh(scores / cap) * cap before the mask."""
    scores = torch.tanh(q @ k.transpose(-1, -2) * scale * (1.0 / cap)) * cap
    return torch.softmax(scores + bias, -1) @ v


def sample_top_p(logits: Tensor) -> Tensor:
    """Sorted probabilities and their running sum, which a nucleus is cut at; here the largest first."""
    return torch.sort(logits, descending=True)[0].softmax(-1).cumsum(-1)


def sample_top_p_ascending(logits: Tensor) -> Tensor:
    """transformers' TopPLogitsWarper: the smallest first."""
    return torch.sort(logits, descending=False)[0].softmax(-1).cumsum(-1)


def dynamic_quant(x: Tensor) -> Tensor:
    """int8 with a scale per row."""
    scale = x.abs().amax(-1, keepdim=True) / 127.0
    return torch.round(x / scale)


def dynamic_quant_clamped(x: Tensor) -> Tensor:
    """torchao's: a scale that is not 0."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127.0
    return torch.round(x / scale)


QKV = {"q": "B H S D", "k": "B H T D", "v": "B H T D", "y": "B H S D"}
SIZES = {"B": 2, "H": 3, "S": 6, "T": 10, "D": 8}
BIASED = {**QKV, "bias": "B|1 H|1 S|1 T"}


def _chain(name: str, *functions: object, shapes: dict[str, str], sizes: dict[str, int], **rest: object) -> Chain:
    first = functions[0]
    return Chain(name, first, tuple((f, {}) for f in functions), shapes, 1, sizes, **rest)  # type: ignore[arg-type,misc]


ROWS = {"N": 4, "H": 6}
CATALOGUE: tuple[Chain, ...] = (
    _chain("gelu_and_mul", gelu_and_mul, shapes={"gate": "*N H", "up": "*N H", "y": "*N H"}, sizes=ROWS),
    _chain("gelu_tanh_and_mul", gelu_tanh_and_mul, shapes={"gate": "*N H", "up": "*N H", "y": "*N H"}, sizes=ROWS),
    _chain("attention_with_softcap", attention_with_softcap, shapes=BIASED, sizes=SIZES, scalars={"scale": 1.0, "cap": 1.0}),
    _chain("attention_with_bias", attention_with_bias, shapes=BIASED, sizes=SIZES, scalars={"scale": 1.0}),
    _chain("attention_with_bias_unscaled", attention_with_bias_unscaled, shapes=BIASED, sizes=SIZES),
    _chain("attention", attention, shapes=QKV, sizes=SIZES, scalars={"scale": 1.0}),
    _chain("sample_top_k_top_p", sample_top_p, shapes={"logits": "*N V", "y": "*N V"}, sizes={"N": 4, "V": 6}, part=True),
    _chain("sample_top_k_top_p", sample_top_p_ascending, shapes={"logits": "*N V", "y": "*N V"}, sizes={"N": 4, "V": 6}, part=True),
    _chain("dynamic_quant", dynamic_quant, dynamic_quant_clamped, shapes={"x": "*N H", "y": "*N H"}, sizes=ROWS),
)  # fmt: skip
