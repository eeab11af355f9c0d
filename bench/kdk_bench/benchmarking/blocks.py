"""Blocks of real models: alone is information, in a model is the truth. A block is built from transformers' own modules at the
model's real widths, and runs as it is and patched by `kdk.patch`, each eager and compiled, forward and backward."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kdk
from kdk.errors import UsageError
from kdk_bench.benchmarking import memory, timing
from kdk_bench.benchmarking.measuring import FAILED, MEASURED, WRONG, Entry, Heat
from kdk_bench.benchmarking.statistics import paired_ratio, percentiles
from kdk_bench.numerics import judge

# Widths, heads and vocabulary as published with each model; one layer of it is built.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": (
        "Llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
            "vocab_size": 151936,
        },
    ),
    "mixtral": (
        "Mixtral",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
            "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
        },
    ),
    "gemma-3": (
        "Gemma3",
        {
            "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "vocab_size": 262208,
        },
    ),
}  # fmt: skip
EAGER, COMPILED, KDK_EAGER, KDK_COMPILED = "eager", "torch.compile", "kdk, eager", "kdk, torch.compile"


class NormAndProjection(nn.Module):
    """A norm and the queries' projection that follows it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.norm, self.projection = layer.input_layernorm, layer.self_attn.q_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.norm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Projections, rotary embedding, attention, output projection; causal."""

    def __init__(self, layer: Any, rotary: nn.Module) -> None:
        super().__init__()
        self.attention, self.rotary = layer.self_attn, rotary

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        # Models with several tables ask for the kind of the layer.
        kind = getattr(self.attention, "layer_type", None)
        tables = self.rotary(x, positions, kind) if kind and hasattr(self.rotary, "layer_types") else self.rotary(x, positions)
        return self.attention(hidden_states=x, position_embeddings=tables, attention_mask=None)[0]  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """A feed-forward block, or a mixture of experts with its router."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.mlp = layer.mlp

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return y[0] if isinstance(y, tuple) else y


class Head(nn.Module):
    """The last norm, the vocabulary's projection and the loss of the next token."""

    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.norm(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = torch.arange(x.shape[0] * x.shape[1], device=x.device) % logits.shape[-1]
        return F.cross_entropy(logits.flatten(0, 1), labels)[None]


BLOCKS: dict[str, Callable[[Any, Any], nn.Module]] = {
    "norm + projection": lambda base, model: NormAndProjection(base.layers[0]),
    "attention": lambda base, model: Attention(base.layers[0], base.rotary_emb),
    "mlp": lambda base, model: Mlp(base.layers[0]),
    "lm head + loss": lambda base, model: Head(base.norm, model.lm_head),
}


@dataclass(frozen=True)
class Block:
    """One block of a model. module: in the dtype and on the device, random weights. x: (1, tokens, hidden)."""

    model: str
    name: str
    module: nn.Module
    x: Tensor


def described(model: str, name: str, dtype: torch.dtype) -> tuple[nn.Module, int]:
    """A block without data, and its hidden size: parameters on the meta device; the rotary table's few numbers are there.

    Raises UsageError for a model that is not known.
    """
    if model not in MODELS:
        limit, way_out = f"there are {', '.join(MODELS)}", "name one of these; `kdk bench OP --case all` has shapes of more models"
        raise UsageError("KDK-BLOCK", "unknown model", value=repr(model), limit=limit, way_out=way_out)
    import transformers

    family, sizes = MODELS[model]
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config_class(num_hidden_layers=1, attn_implementation="sdpa", **sizes)
    with torch.device("meta"):
        whole = getattr(transformers, f"{family}ForCausalLM")(config)
    module = BLOCKS[name](whole.model, whole).to(dtype).eval()
    if hasattr(module, "rotary"):
        module.rotary = type(whole.model.rotary_emb)(config)  # its tables are computed, not random, and stay in float32
    return module, config.hidden_size


def build(model: str, name: str, tokens: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Block:
    """A block with random weights. Only its own parameters take memory. Raises UsageError for a model that is not known."""
    module, hidden = described(model, name, dtype)
    rotary = getattr(module, "rotary", None)
    if rotary is not None:
        module.rotary = nn.Identity()
    module.to_empty(device=device)
    if rotary is not None:
        module.rotary = rotary.to(device)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for p in module.parameters():
            if p.dim() == 1:
                p.normal_(1.0, 0.1)
            else:
                p.normal_(0.0, p.shape[-1] ** -0.5)
        x = torch.randn((1, tokens, hidden)).to(dtype).to(device)
    return Block(model, name, module, x)


def _patched(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    kdk.patch(module)
    return module


@functools.cache
def operators(model: str, name: str) -> tuple[str, ...]:
    """Those that `kdk.patch` puts into a block."""
    report = kdk.patch(described(model, name, torch.bfloat16)[0])
    return tuple(sorted({operator for row in report.replaced for operator in row.operators}))


def _variants(block: Block) -> dict[str, Any]:
    patched = _patched(block.module)
    return {
        EAGER: block.module,
        COMPILED: torch.compile(copy.deepcopy(block.module), dynamic=False),
        KDK_EAGER: patched,
        KDK_COMPILED: torch.compile(_patched(block.module), dynamic=False),
    }


def _runner(module: Any, x: Tensor, direction: str) -> Callable[[], Any]:
    """A forward without gradients; or forward and backward, the gradients of x and of every parameter with it."""
    if direction == "forward":

        def forward() -> Any:
            with torch.no_grad():
                return (module(x),)

        return forward
    leaf = x.detach().requires_grad_()
    parameters = [p for p in module.parameters() if p.is_floating_point()]

    def both() -> Any:
        y = module(leaf)
        return torch.autograd.grad(y, [leaf, *parameters], torch.ones_like(y), allow_unused=True)

    return both


def _wrong(got: tuple[Tensor | None, ...], plain: tuple[Tensor | None, ...], oracle: tuple[Tensor | None, ...], longest: int) -> str:
    """Why the patched block is less accurate than twice the plain one, or ""."""
    for i, (k, y, o) in enumerate(zip(got, plain, oracle)):
        if k is None or y is None or o is None:
            continue
        verdict = judge(k.contiguous(), y.contiguous(), o, longest=longest)
        if not verdict.accepted:
            return f"result {i}: {verdict.reason}"
    return ""


def measure(block: Block, direction: str, target: str, seconds: float) -> list[Entry]:
    """Everyone's entry; kdk's are judged against the plain block in float64 before they are timed."""
    heat = Heat(f"{block.model}: {block.name}", direction, str(block.x.dtype).removeprefix("torch."), target, block.model,
                {"tokens": block.x.shape[1], "hidden": block.x.shape[2]}, True, operators(block.model, block.name))  # fmt: skip
    wide = copy.deepcopy(block.module).double()
    oracle = _runner(wide, block.x.double(), direction)()
    del wide
    plain = _runner(block.module, block.x, direction)()
    longest = max(max(p.shape) for p in block.module.parameters())
    wait = timing.synchroniser(block.x.device)
    entries: dict[str, Entry] = {}
    runs: dict[str, Any] = {}
    colds: dict[str, float] = {}
    for name, module in _variants(block).items():
        own = "default" if name.startswith("kdk") else ""
        entry = Entry(heat, name, own, MEASURED)
        try:
            start, run = time.perf_counter(), _runner(module, block.x, direction)
            got = run()
            wait()
            colds[name] = time.perf_counter() - start
            reason = _wrong(got, plain, oracle, longest) if own else ""
            entries[name] = replace(entry, outcome=WRONG, reason=reason) if reason else entry
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            entries[name] = replace(entry, outcome=FAILED, reason=f"{type(error).__name__}: {text}")
        if entries[name].outcome == MEASURED:
            runs[name] = run
    for name, found in timing.take_turns(runs, colds, wait, seconds).items():
        entries[name] = replace(entries[name], cold=colds[name], samples=tuple(found.samples), times=percentiles(found.samples),
                                peak_memory=memory.peak(runs[name], block.x.device))  # fmt: skip
    return _with_ratios(list(entries.values()))


def _with_ratios(entries: list[Entry]) -> list[Entry]:
    eager = next((e for e in entries if e.contender == EAGER and e.samples), None)
    if eager is None:
        return entries
    found = []
    for e in entries:
        r = paired_ratio(e.samples, eager.samples) if e.samples else None
        found.append(replace(e, ratio={"to": EAGER, "value": r.value, "low": r.low, "high": r.high} if r else None))
    return found
