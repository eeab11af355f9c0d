"""Cases of nki_conformance: the mixtures of experts of nki-library, against the formula of a mixture in float64."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

from kdk_bench.nki_conformance_cases import Built, case
from kdk_bench.nki_conformance_library import BF16, SOURCE, tensor, torch_module

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN = 4, 512, 256, 4, 2


INTEGER_MODES = (
    "nkilib.core.subkernels.norm_tkg_utils",
    "nkilib.core.mlp.mlp_tkg.mlp_tkg_gate_up_projection",
    "nkilib.core.mlp.mlp_tkg.mlp_tkg_down_projection",
    "nkilib.core.mlp.mlp_tkg.mlp_tkg_utils",
)


@contextlib.contextmanager
def decode_repairs() -> Iterator[None]:
    """What keeps the decoding kernels from running, for one case: integers of dge_mode become its members, and
    remainderIFused, a field without a default that its only caller leaves out, becomes None.
    """
    from nki import isa  # type: ignore[import-not-found]

    constants = importlib.import_module("nkilib.core.mlp.mlp_tkg.mlp_tkg_constants")
    sizes = functools.partial(constants.MLPTKGConstantsDimensionSizes, remainderIFused=None)
    named = {"_DGE_MODE_NONE": isa.dge_mode.none, "_DGE_MODE_UNKNOWN": isa.dge_mode.unknown}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(constants, "MLPTKGConstantsDimensionSizes", sizes))
        for module in map(importlib.import_module, INTEGER_MODES):
            for name in named.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, named[name]))
        yield


REPAIRED: dict[str, Any] = {"around": decode_repairs, **SOURCE}


def weights(dtype: str = "bfloat16", experts: int = EXPERTS) -> tuple[Any, Any]:
    """Gate and up (experts, width, 2, inner), and down (experts, inner, width)."""
    dtypes = getattr(torch_module(), dtype)
    up = tensor(experts, WIDTH, 2, INNER, seed=1) / 16
    return up.to(dtypes), (tensor(experts, INNER, WIDTH, seed=2) / 16).to(dtypes)


def mixture(x: Any, gate_up: Any, down: Any, share: Any) -> Any:
    """sum over experts of share[t, e] * (silu(x gate_e) * (x up_e)) down_e, in float64."""
    torch = torch_module()
    x, gate_up, down, share = (t.double() for t in (x, gate_up, down, share))
    gate, up = torch.einsum("th,ehpi->ptei", x, gate_up)
    return torch.einsum("tei,eih,te->th", torch.nn.functional.silu(gate) * up, down, share)


def routing(tokens: int, experts: int, chosen: int) -> tuple[Any, Any, Any]:
    """Shares of all experts, the chosen experts, and the shares with those of the others 0."""
    torch = torch_module()
    shares = torch.softmax(tensor(tokens, experts, seed=3), -1)
    index = torch.topk(shares, chosen)[1]
    return shares, index.to(torch.int32), torch.zeros_like(shares).scatter(1, index, shares.gather(1, index))


TKG = ("nkilib.core.moe.moe_tkg.moe_tkg", "moe_tkg")


def moe_tkg(module: ModuleType, every: bool) -> Built:
    torch = torch_module()
    x, (gate_up, down) = tensor(TOKENS, WIDTH, dtype="bfloat16"), weights()
    shares, index, chosen = routing(TOKENS, EXPERTS, CHOSEN)
    settings = {"expert_affinities_scaling_mode": module.ExpertAffinityScaleMode.POST_SCALE}
    if every:
        shares = shares.bfloat16()
        settings |= {"rank_id": torch.zeros(1, 1, dtype=torch.int32)}
    want = mixture(x, gate_up, down, shares if every else chosen)
    return (x, gate_up, down, shares, index, every), settings, want


for _grid, _all in itertools.product((1, 2), (False, True)):

    @case("nki-library", f"moe_tkg[{_grid}, {'all' if _all else 'chosen'}, repaired]", *TKG, grid=_grid, tolerance=BF16, **REPAIRED)
    def _moe_tkg(module: ModuleType, every: bool = _all) -> Built:
        return moe_tkg(module, every)


@case("nki-library", "moe_tkg", *TKG, refused="TypeError: remainderIFused", **SOURCE)
def _moe_tkg_as_it_is(module: ModuleType) -> Built:
    """Python's dataclass misses remainderIFused; the parser front end would fill it, but does not take the kernel's `is`."""
    return moe_tkg(module, False)


BLOCK = 256
CTE = ("nkilib.core.moe.moe_cte.moe_cte", "moe_cte")


def blocks(chosen: Any) -> tuple[Any, Any]:
    """Rows of each block, padded with the number of tokens, and the expert of each block, an even number of blocks."""
    torch = torch_module()
    tokens, experts = chosen.shape
    rows: list[int] = []
    owners: list[int] = []
    for expert in range(experts):
        mine = torch.nonzero(chosen[:, expert])[:, 0].tolist()
        mine += [tokens] * (-len(mine) % BLOCK)
        rows += mine
        owners += [expert] * (len(mine) // BLOCK)
    if len(owners) % 2:
        rows, owners = rows + [tokens] * BLOCK, owners + owners[-1:]
    return torch.tensor(rows, dtype=torch.int32), torch.tensor(owners, dtype=torch.int32)[:, None]


def padded(x: Any) -> Any:
    """With a row of zeros for the padding."""
    return torch_module().cat([x, x[:1] * 0])


for _implementation, _refused in (("shard_on_block", ""), ("shard_on_i", "C21")):

    @case(
        "nki-library",
        f"moe_cte[{_implementation}, top 2]",
        *CTE,
        grid=2,
        tolerance=BF16,
        refused=_refused,
        **SOURCE,
    )
    def _moe_cte(module: ModuleType, implementation: str = _implementation) -> Built:
        """On I, both cores zero the whole output with no barrier between; core_barrier is for disjoint portions."""
        tokens = 384
        x, (gate_up, down) = tensor(tokens, WIDTH, dtype="bfloat16"), weights()
        chosen = routing(tokens, EXPERTS, CHOSEN)[2].bfloat16()
        rows, owners = blocks(chosen)
        spec = module.MoECTESpec(module.MoECTEImplementation[implementation])
        want = mixture(x, gate_up, down, chosen)
        args = (padded(x), padded(chosen).reshape(-1, 1), gate_up, down, rows, owners, BLOCK, spec)
        return args, {}, lambda got: (got[:tokens].double().sum(1), want)


def top_1(module: ModuleType, implementation: str, dtype: str, **settings: Any) -> Built:
    """511 tokens with one expert each and one padded row, so that only one core writes that row of the output."""
    torch = torch_module()
    tokens = 2 * BLOCK - 1
    x, (gate_up, down) = tensor(tokens, WIDTH, dtype=dtype), weights(dtype, 2)
    chosen = torch.zeros(tokens, 2, dtype=x.dtype)
    chosen[:BLOCK, 0], chosen[BLOCK:, 1] = 0.75, 0.5
    rows, owners = blocks(chosen)
    spec = module.MoECTESpec(module.MoECTEImplementation[implementation])
    args = (padded(x), padded(chosen).reshape(-1, 1), gate_up, down, rows, owners, BLOCK, spec)
    settings |= {"is_tensor_update_accumulating": False, "compute_dtype": dtype}
    want = mixture(x, gate_up, down, chosen)
    return args, settings, lambda got: (got[:tokens], want)


@case("nki-library", "moe_cte[shard_on_i, top 1, float32]", *CTE, grid=2, **SOURCE)
def _moe_cte_float32(module: ModuleType) -> Built:
    return top_1(module, "shard_on_i", "float32")


@case("nki-library", "moe_cte[shard_on_i, top 1, bfloat16]", *CTE, grid=2, refused="C7: must be float32", **SOURCE)
def _moe_cte_bfloat16(module: ModuleType) -> Built:
    """Scales by affinities in bfloat16; the operand of tensor_scalar "must be float32"."""
    return top_1(module, "shard_on_i", "bfloat16")


@case("nki-library", "moe_cte[shard_on_i_hybrid, top 1]", *CTE, grid=2, refused="C24: dynamic_range", **SOURCE)
def _moe_cte_hybrid(module: ModuleType) -> Built:
    """nl.dynamic_range belongs to the parser front end, which does not take the kernel's `is`; 0.7 has nl.fori_loop."""
    torch = torch_module()
    return top_1(module, "shard_on_i_hybrid", "float32", conditions=torch.tensor([1, 1, 0], dtype=torch.int32))


for _chosen in (1, 2):

    @case(
        "nki-library",
        f"blockwise_mm_baseline_shard_hidden[top {_chosen}]",
        "nkilib.experimental.moe.forward.bwmm_shard_on_H",
        "blockwise_mm_baseline_shard_hidden",
        grid=2,
        tolerance=BF16,
        **SOURCE,
    )
    def _on_hidden(_: ModuleType, chosen: int = _chosen) -> Built:
        tokens = 384
        x, (gate_up, down) = tensor(tokens, WIDTH, dtype="bfloat16"), weights()
        shares = routing(tokens, EXPERTS, chosen)[2].bfloat16()
        rows, owners = blocks(shares)
        settings = {"block_size": BLOCK, "token_position_to_id": rows, "block_to_expert": owners}
        want = mixture(x, gate_up, down, shares)
        return (padded(x), padded(shares).reshape(-1, 1), gate_up, down), settings, lambda got: (got[:tokens], want)


def backward(chosen: int) -> Built:
    """Gradients of tokens, shares (those that are not 0) and both weights, by autograd in float64."""
    torch = torch_module()
    tokens, experts = 2 * BLOCK - 1, 2
    x, (gate_up, down) = tensor(tokens, WIDTH, dtype="bfloat16"), weights(experts=experts)
    shares = routing(tokens, experts, chosen)[2].bfloat16()
    dy = tensor(tokens, WIDTH, seed=5, dtype="bfloat16")
    leaves = [t.double().requires_grad_() for t in (x, gate_up, down, shares)]
    mixture(*leaves).backward(dy.double())
    grads = [t.grad for t in leaves]
    grads[3] = grads[3] * (shares != 0)
    rows, owners = blocks(shares)
    experts_of = owners[:, 0].long()
    x_blocks = padded(x)[rows.long().reshape(-1, BLOCK)].double()
    inner = torch.einsum("nbh,nhpi->npib", x_blocks, gate_up[experts_of].double())
    activated = torch.nn.functional.silu(inner[:, 0]) * inner[:, 1]
    outer = torch.einsum("nib,nih->nbh", activated, down[experts_of].double())
    kept = (inner.bfloat16(), outer.bfloat16())  # what the forward kernel saved
    args = (padded(x), padded(shares).reshape(-1, 1), gate_up, down, *kept, rows, owners, padded(dy), BLOCK)

    def compared(got: Any) -> tuple[Any, Any]:
        d_x, d_shares, d_gate_up, d_down = got[:4]
        d_shares = d_shares.reshape(tokens + 1, experts)[:tokens].double() * (shares != 0)
        return (d_x[:tokens], d_gate_up, d_down, d_shares), grads

    return args, {"is_tensor_update_accumulating": chosen != 1}, compared


BACKWARD = ("nkilib.experimental.moe.bwd.blockwise_mm_backward", "blockwise_mm_bwd")

for _chosen in (1, 2):

    @case("nki-library", f"blockwise_mm_bwd[1, top {_chosen}]", *BACKWARD, grid=1, tolerance=BF16, **SOURCE)
    def _backward(_: ModuleType, chosen: int = _chosen) -> Built:
        return backward(chosen)


@case("nki-library", "blockwise_mm_bwd[2, top 2]", *BACKWARD, grid=2, refused="C21", **SOURCE)
def _backward_two_cores(_: ModuleType) -> Built:
    """Each core zeroes half of the shares' gradient, then writes rows of both halves, with no barrier on it between."""
    return backward(2)


@contextlib.contextmanager
def present_typing() -> Iterator[None]:
    """neuronxcc.nki.typing, from before NKI 0.4, is today's nki.typing, for one case."""
    from nki import typing  # type: ignore[import-not-found]

    old: dict[str, Any] = {name: ModuleType(name) for name in ("neuronxcc", "neuronxcc.nki")}
    old["neuronxcc"].nki, old["neuronxcc.nki"].typing = old["neuronxcc.nki"], typing
    sys.modules.update(old | {"neuronxcc.nki.typing": typing})
    try:
        yield
    finally:  # what imported it goes too, so that another case finds its import refused
        for name in [n for n in sys.modules if n.startswith(("neuronxcc", "nkilib.core.router_topk", "nkilib.core.moe_block"))]:
            del sys.modules[name]


ROUTER = ("nkilib.core.router_topk.router_topk", "router_topk")


@case("nki-library", "router_topk", *ROUTER, refused="ModuleNotFoundError: neuronxcc", **SOURCE)
@case(
    "nki-library",
    "moe_block_tkg",
    "nkilib.core.moe_block.moe_block_tkg",
    "moe_block_tkg",
    refused="ModuleNotFoundError: neuronxcc",
    **SOURCE,
)
def _old_typing(_: ModuleType) -> Built:
    """Imports neuronxcc.nki.typing, which NKI 0.4 removed."""
    return (), {}, None


def router(module: ModuleType, before: bool, **settings: Any) -> Built:
    """Softmax over all experts before the choice, or over the chosen after it; three results, written to arguments."""
    torch = torch_module()
    tokens, experts, chosen = 256, 64, 4
    x, weight, bias = tensor(tokens, WIDTH), tensor(WIDTH, experts, seed=1) / 16, tensor(1, experts, seed=2)
    outs = [torch.zeros(tokens, experts), torch.zeros(tokens, experts), torch.zeros(tokens, chosen, dtype=torch.int32)]
    logits = x.double() @ weight.double() + bias.double()
    values, index = torch.topk(logits, chosen)
    shares = torch.softmax(logits, -1) if before else torch.zeros_like(logits).scatter(1, index, torch.softmax(values, -1))
    act = module.common_types.RouterActFnType.SOFTMAX
    args = (x, weight, bias, *outs, act, chosen, module.XHBMLayout_T_H__1, module.XSBLayout_tp102__0)
    return args, {"router_pre_norm": before, **settings}, lambda _: (outs, (logits, shares, index))


TYPED: dict[str, Any] = {"around": present_typing, **SOURCE}

for _before in (True, False):
    _name = f"router_topk[2, softmax {'before' if _before else 'after'} the choice, repaired]"

    @case("nki-library", _name, *ROUTER, grid=2, **TYPED)
    def _router(module: ModuleType, before: bool = _before) -> Built:
        return router(module, before, shard_on_tokens=True)


@case("nki-library", "router_topk[1, softmax after the choice, repaired]", *ROUTER, refused="C3: core_barrier", **TYPED)
def _router_one_core(module: ModuleType) -> Built:
    """core_barrier on a tensor of one core; it is for data in shared HBM, with two cores."""
    return router(module, False)


@case("nki-library", "router_topk[2, softmax after the choice, not sharded, repaired]", *ROUTER, grid=2, refused="C21", **TYPED)
def _router_not_sharded(module: ModuleType) -> Built:
    """Both cores write the whole of every result with no barrier between."""
    return router(module, False)


@contextlib.contextmanager
def block_repairs() -> Iterator[None]:
    """Both of the above."""
    with present_typing(), decode_repairs():
        yield


BLOCK_TKG: dict[str, Any] = {"grid": 2, "around": block_repairs, **SOURCE}


def moe_block(module: ModuleType, every: bool) -> Built:
    """Normalisation, router and experts in one kernel; it is for two cores only."""
    x, gamma = tensor(1, TOKENS, WIDTH, dtype="bfloat16"), tensor(1, WIDTH, seed=9, dtype="bfloat16")
    choice = (tensor(WIDTH, 8, seed=8) / 16).bfloat16()
    mode = module.ExpertAffinityScaleMode.POST_SCALE
    settings = {"top_k": CHOSEN, "router_act_fn": module.RouterActFnType.SOFTMAX, "expert_affinities_scaling_mode": mode}
    rank = torch_module().zeros(1, 1, dtype=torch_module().int32)
    return (x, gamma, choice, *weights(experts=8)), {**settings, "is_all_expert": every, "rank_id": rank}, None


MOE_BLOCK = ("nkilib.core.moe_block.moe_block_tkg", "moe_block_tkg")


@case("nki-library", "moe_block_tkg[chosen, repaired]", *MOE_BLOCK, refused="C3: core_barrier", **BLOCK_TKG)
def _moe_block(module: ModuleType) -> Built:
    """core_barrier on a tile in SBUF; its data "must be data in shared HBM"."""
    return moe_block(module, False)


@case("nki-library", "moe_block_tkg[all, repaired]", *MOE_BLOCK, refused="C21", **BLOCK_TKG)
def _moe_block_all(module: ModuleType) -> Built:
    """Both cores write the router's logits with no barrier between."""
    return moe_block(module, True)


GATHER = ("nkilib.experimental.collectives.sb2sb_allgather", "allgather_sb2sb")


@case("nki-library", "allgather_sb2sb", *GATHER, refused="NotImplementedError: all_gather", **SOURCE)
def _all_gather(module: ModuleType) -> Built:
    """nki.collectives.all_gather: no collective is emulated, nor in the vendor's simulator."""
    return (tensor(128, 64, dtype="bfloat16"), module.ReplicaGroup([[0, 1]]), 2), {}, None


REDUCE = ("nkilib.experimental.collectives.topk_reduce", "topk_reduce")

for _grid in (1, 2):

    @case("nki-library", f"topk_reduce[{_grid}]", *REDUCE, grid=_grid, tolerance=BF16, **SOURCE)
    def _topk_reduce(_: ModuleType) -> Built:
        """Rows scattered over a buffer, each with its token's number in its last four bytes; -1 is nobody's row."""
        torch = torch_module()
        tokens, chosen, rows = 16, 2, 64
        x, places = tensor(rows, WIDTH, dtype="bfloat16"), torch.randperm(rows, generator=torch.Generator().manual_seed(0))
        places = places[: chosen * tokens].reshape(chosen, tokens)
        numbers = torch.full((rows,), -1, dtype=torch.int32)
        numbers[places] = torch.arange(tokens, dtype=torch.int32)
        packed = torch.cat([x, numbers.view(torch.bfloat16).reshape(rows, 2)], 1).contiguous()
        return (packed, tokens, chosen), {}, x[places].double().sum(0)
