"""Plain-torch spellings that rope replaces. Each takes (q, k, cos, sin) and equals the reference with the given pairing.

Models make tables in which the two members of a pair share an angle; the spellings that read one entry for both rely on it.
"""

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import kdk.ops
from kdk.errors import UsageError
from kdk.patterns import FunctionPattern, LeftPattern, Trial


def llama(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' apply_rotary_pos_emb of Llama, Qwen, Mistral and most others; every element turns."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)

    def rotate_half(x: Tensor) -> Tensor:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-second, first), dim=-1)

    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' GPT-NeoX and Phi: the first R elements turn, the rest is put back behind them."""
    rotary = cos.shape[-1]
    q_turned, k_turned = llama(q[..., :rotary], k[..., :rotary], cos, sin)
    return torch.cat((q_turned, q[..., rotary:]), dim=-1), torch.cat((k_turned, k[..., rotary:]), dim=-1)


def chunked(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The halves as chunks and half a table, as in vLLM's native forward and Gemma's own code."""
    c, s = (table.chunk(2, dim=-1)[0].unsqueeze(-2) for table in (cos, sin))

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

    return turn(q), turn(k)


def every_two(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' GPT-J, GLM and Cohere: every second element, stacked and flattened."""
    rotary = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)

    def turn(x: Tensor) -> Tensor:
        turning, rest = x[..., :rotary], x[..., rotary:]
        rotated = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
        return torch.cat((turning * cos + rotated * sin, rest), dim=-1)

    return turn(q), turn(k)


def pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs as a last dimension of 2, as in torchtune and many research models."""
    c, s = cos[..., ::2].unsqueeze(-2), sin[..., ::2].unsqueeze(-2)

    def turn(x: Tensor) -> Tensor:
        x = x.reshape(*x.shape[:-1], -1, 2)
        turned = torch.stack((x[..., 0] * c - x[..., 1] * s, x[..., 1] * c + x[..., 0] * s), dim=-1)
        return turned.flatten(-2)

    return turn(q), turn(k)


def complex_numbers(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Meta's Llama code: the pairs as complex numbers, multiplied by exp(i * angle)."""
    turn = torch.complex(cos[..., ::2], sin[..., ::2]).unsqueeze(-2)

    def turned(x: Tensor) -> Tensor:
        numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).to(torch.promote_types(x.dtype, torch.float32)))
        return torch.view_as_real(numbers * turn).flatten(-2).to(x.dtype)

    return turned(q), turned(k)


SPELLINGS: tuple[tuple[Callable[..., tuple[Tensor, Tensor]], Mapping[str, bool]], ...] = (
    (llama, {"interleaved": False}),
    (partial, {"interleaved": False}),
    (chunked, {"interleaved": False}),
    (every_two, {"interleaved": True}),
    (pairs, {"interleaved": True}),
    (complex_numbers, {"interleaved": True}),
)
"""(function, the scalar arguments with which the operator equals it)."""


# Models: global functions that the forward of an attention calls, with q and k (B, H, S, D), as transformers has them.
def call_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Llama's and Phi-3's: pairs are half a head apart; the result has the wider dtype of q and the tables."""
    dtype = torch.promote_types(q.dtype, cos.dtype)
    return _rotate(q.to(dtype), k.to(dtype), cos.to(dtype), sin.to(dtype), unsqueeze_dim, False)


def call_halves_in_q_dtype(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """OLMo's: pairs are half a head apart; the result has the dtype of q."""
    return _rotate(q, k, _table(cos, q), _table(sin, q), unsqueeze_dim, False)


def call_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Cohere's: pairs are neighbours; the result has the dtype of q."""
    return _rotate(q, k, _table(cos, q), _table(sin, q), unsqueeze_dim, True)


def _table(table: Tensor, q: Tensor) -> Tensor:
    return table if table.dtype == q.dtype else table.float()


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Heads before the sequence (1) are brought behind it by strides alone."""
    if unsqueeze_dim == 2:
        return kdk.ops.rope(q, k, cos, sin, interleaved)
    if unsqueeze_dim != 1:
        raise UsageError(
            "ROPE-PATCHED",
            "a patched rotary function: unsqueeze_dim",
            value=unsqueeze_dim,
            limit="1 for (B, H, S, D), 2 for (B, S, H, D)",
            way_out="kdk.unpatch(model)",
        )
    q_out, k_out = kdk.ops.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, interleaved)
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def _trials() -> list[Trial]:
    """Both layouts, one table for all sequences or one each, tables whose halves differ, equal and mixed dtypes."""
    trials = []
    for dtype, table_dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        for batch, rotary in ((2, 8), (1, 8), (2, 4)):
            cos, sin = (torch.randn(batch, 3, rotary).to(table_dtype) for _ in range(2))
            q, k = (torch.randn(2, heads, 3, 8).to(dtype) for heads in (4, 2))
            trials += [Trial((q, k, cos, sin)), Trial((q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2))]
    return trials


FUNCTIONS = (FunctionPattern(names=r"apply_.*rotary.*", replacements=(call_halves, call_halves_in_q_dtype, call_pairs), trials=_trials),)
"""Which of them it is, if any, is found by trial."""
LEFT = (LeftPattern(r".*Rotary(Position)?Embedding\w*", "it makes the tables that rope reads"),)
