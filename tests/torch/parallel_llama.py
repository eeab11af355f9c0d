"""Cases for two processes: a patched Llama under FSDP2, tensor and sequence parallelism, against one process in float64.

The rule is that of a kernel: the loss and every gradient may be at most twice as wrong as those of the same model, made parallel
in the same way, without kdk.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tests.torch.two_processes import Case
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import kdk
from kdk_bench.numerics import Verdict, judge

VOCABULARY = 50
TOKENS = torch.randint(3, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0))
NORMS = ("input_layernorm", "post_attention_layernorm")


def build() -> nn.Module:
    """A small Llama with weights that are all random, the same in every process."""
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


def fsdp(model: nn.Module, mesh: Any) -> Tensor:
    """Each process takes one of the two sequences; their losses have equal weight."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return TOKENS[mesh.get_rank() : mesh.get_rank() + 1]


def tensor_parallel(model: nn.Module, mesh: Any) -> Tensor:
    """Heads and the MLP's columns are split, everything else is plain and the same in both processes."""
    layer_plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    layer_plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    layer_plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    return _parallelize(model, mesh, layer_plan, {})


def with_dtensors_inside(model: nn.Module, mesh: Any) -> Tensor:
    """The MLP's projections give DTensors: silu_and_mul gets columns that are sharded."""
    layer_plan: dict[str, ParallelStyle] = {f"mlp.{name}_proj": ColwiseParallel(use_local_output=False) for name in ("gate", "up")}
    return _parallelize(model, mesh, layer_plan | {"mlp.down_proj": RowwiseParallel()}, {})


def sequence_parallel(model: nn.Module, mesh: Any) -> Tensor:
    """The norms get DTensors that are sharded along the sequence, with replicated weights."""
    whole = functools.partial(RowwiseParallel, output_layouts=Replicate(), use_local_output=False)
    layer_plan: dict[str, ParallelStyle] = {name: SequenceParallel() for name in NORMS}
    layer_plan |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    layer_plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    layer_plan |= {name: whole() for name in ("self_attn.o_proj", "mlp.down_proj")}
    layer_plan["mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    hidden = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
    layer_plan["self_attn"] = PrepareModuleInput(input_kwarg_layouts=hidden[0], desired_input_kwarg_layouts=hidden[1])
    outside = {
        "model.embed_tokens": whole(input_layouts=Replicate()),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return _parallelize(model, mesh, layer_plan, outside)


def _parallelize(model: nn.Module, mesh: Any, layer_plan: Any, outside: Any) -> Tensor:
    for layer in model.model.layers:
        parallelize_module(layer, mesh, layer_plan)
    if outside:
        parallelize_module(model, mesh, outside)
    return TOKENS


def train(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """The loss and every gradient, whole."""
    logits = model(tokens).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    found = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}
    loss = loss.detach()
    if len(tokens) < len(TOKENS):
        dist.all_reduce(loss)
        loss /= 2
    return {"loss": loss, **found}


def agrees(parallel: Callable[[nn.Module, Any], Tensor], patch_first: bool, mesh: Any) -> None:
    oracle = train(build().double(), TOKENS)
    plain, patched = build(), build()
    usual = train(plain, parallel(plain, mesh))
    if patch_first:
        kdk.patch(patched)
    tokens = parallel(patched, mesh)
    if not patch_first:
        kdk.patch(patched)
    with kdk.record() as ran:
        found = train(patched, tokens)
    calls = {name: (ran.calls(name), ran.calls(name, "backward")) for name in ("rms_norm", "rope", "silu_and_mul")}
    assert calls == {"rms_norm": (5, 5), "rope": (2, 2), "silu_and_mul": (2, 2)}
    assert set(found) == set(oracle)
    for name, expected in oracle.items():
        verdict = compare(found[name], usual[name], expected)
        assert verdict.accepted, f"{name}: {verdict.reason}"


def compare(found: Tensor, usual: Tensor, oracle: Tensor) -> Verdict:
    """Every tensor as one slice: which row of a gradient a rounding far away hits is luck, for the usual model too."""
    return judge(found.flatten(), usual.flatten(), oracle.flatten(), longest=VOCABULARY)


def a_wrong_gradient_is_seen(mesh: Any) -> None:
    """The rule is no formality: one part of a sum over both processes does not pass for the sum."""
    oracle, model = train(build().double(), TOKENS), build()
    usual = train(model, fsdp(model, mesh))
    half = copy.copy(usual)
    half["model.norm.weight"] = train(build(), TOKENS[:1])["model.norm.weight"]
    verdicts = {name: compare(half[name], usual[name], o).accepted for name, o in oracle.items()}
    assert [name for name, accepted in verdicts.items() if not accepted] == ["model.norm.weight"]


def cases(mesh: Any) -> Iterator[Case]:
    ways = ((fsdp, True), (fsdp, False), (tensor_parallel, True), (with_dtensors_inside, False), (sequence_parallel, True))
    for parallel, patch_first in ways:
        name = f"{parallel.__name__}, patched {'before' if patch_first else 'after'}"
        yield name, functools.partial(agrees, parallel, patch_first, mesh)
    yield "a wrong gradient is seen", functools.partial(a_wrong_gradient_is_seen, mesh)
