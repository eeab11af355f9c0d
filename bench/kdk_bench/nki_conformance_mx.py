"""Cases of nki_conformance: MX kernels of nki-library, against the formula of a mixture with the dequantised weights.

The tokens are multiples of 1/4 up to 2, which float8 holds exactly; what remains is one rounding of the intermediate
result to float8 with a shared scale, summed over 512 to 1024 products: 5 % of the largest value.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from kdk_bench.nki_conformance_cases import Built, case
from kdk_bench.nki_conformance_library import SOURCE, torch_module
from kdk_bench.nki_conformance_moe import BLOCK, REPAIRED, TKG, blocks, routing

WIDTH, EXPERTS, CHOSEN, PARTITIONS = 512, 4, 2, 128
TOLERANCE = 0.05
FORMATS = {
    "float8_e4m3fn_x4": ml_dtypes.float8_e4m3fn,
    "float8_e5m2_x4": ml_dtypes.float8_e5m2,
    "float4_e2m1fn_x4": ml_dtypes.float4_e2m1fn,
}


@dataclass
class Packed:
    """A weight (experts, K, N): `words` (experts, partitions, K / 4 / partitions, N) of four values each, `scales`
    (experts, partitions / 8, ...), and `exact`, the values in float64.
    """

    words: np.ndarray
    scales: np.ndarray
    exact: np.ndarray


def packed(rows: int, columns: int, seed: int, dtype: str, quarters: bool = False) -> Packed:
    """The four values of a word are rows a quarter of all apart, or neighbours of the same tile of 4 * partitions rows."""
    partitions = min(PARTITIONS, rows // 4)
    shape = (EXPERTS, partitions, rows // (4 * partitions), columns)
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((*shape, 4), np.float32).astype(FORMATS[dtype])
    scales = rng.integers(121, 124, (EXPERTS, partitions // 8, *shape[2:])).astype(np.uint8)
    factors = np.exp2(np.repeat(scales, 8, 1).astype(np.float64) - 127)
    order = (0, 4, 2, 1, 3) if quarters else (0, 2, 4, 1, 3)
    exact = (values.astype(np.float64) * factors[..., None]).transpose(order).reshape(EXPERTS, rows, columns)
    if dtype.startswith("float4"):
        bits = values.view(np.uint8).astype(np.uint16) & np.uint16(15)
        words = np.bitwise_or.reduce(bits << np.arange(0, 16, 4, dtype=np.uint16), -1)
    else:
        words = values.view(np.uint32)[..., 0]
    return Packed(words, scales, exact)


@dataclass
class Mixture:
    """Arguments of a mixture of experts with MX weights, and `want(tokens, share)`."""

    tokens: np.ndarray
    gate: Packed
    up: Packed
    down: Packed
    gate_up_bias: np.ndarray
    down_bias: np.ndarray

    @property
    def words(self) -> np.ndarray:
        return np.stack([self.gate.words, self.up.words], 2)

    @property
    def scales(self) -> np.ndarray:
        return np.stack([self.gate.scales, self.up.scales], 2)

    def want(self, share: np.ndarray) -> np.ndarray:
        inner = self.down.exact.shape[1]
        biases = self.gate_up_bias.transpose(2, 0, 3, 4, 1).reshape(2, EXPERTS, inner)
        weights = (self.gate.exact, self.up.exact)
        gate, up = (np.einsum("th,ehi->tei", self.tokens, w) + b for w, b in zip(weights, biases))
        down = np.einsum("tei,eih->teh", gate / (1 + np.exp(-gate)) * up, self.down.exact) + self.down_bias
        return np.einsum("teh,te->th", down, share)


def mixture(tokens: int, inner: int, dtype: str = "float8_e4m3fn_x4") -> Mixture:
    rng = np.random.default_rng(0)
    rows = min(PARTITIONS, inner // 4)
    gate_up_bias = rng.integers(-8, 9, (EXPERTS, rows, 2, inner // (4 * rows), 4)) / 8
    return Mixture(
        rng.integers(-8, 9, (tokens, WIDTH)) / 4,
        packed(WIDTH, inner, 1, dtype),
        packed(WIDTH, inner, 2, dtype),
        packed(inner, WIDTH, 3, dtype),
        gate_up_bias,
        rng.integers(-8, 9, (EXPERTS, WIDTH)) / 8,
    )


def bfloat16(x: np.ndarray) -> Any:
    return torch_module().from_numpy(x).bfloat16()


def on_words(module: ModuleType) -> Callable[..., Any]:
    """moe_tkg on words of 32 bits, viewed through the library's own TensorView: it uses `base_tensor` of a weight."""
    view = importlib.import_module("nkilib.core.utils.tensor_view").TensorView

    def moe_tkg_mx(x, up, down, shares, index, every, rank, up_scale, down_scale, up_bias, down_bias):  # type: ignore[no-untyped-def]
        return module.moe_tkg(
            x,
            view(up).reinterpret_cast("float8_e4m3fn_x4"),
            view(down).reinterpret_cast("float8_e4m3fn_x4"),
            shares,
            index,
            every,
            rank_id=rank,
            expert_gate_up_bias=up_bias,
            expert_down_bias=down_bias,
            expert_gate_up_weights_scale=up_scale,
            expert_down_weights_scale=down_scale,
            expert_affinities_scaling_mode=module.ExpertAffinityScaleMode.POST_SCALE,
        )

    return moe_tkg_mx


def decode(every: bool, inner: int) -> Built:
    torch = torch_module()
    tokens = 32 if every else 4
    made = mixture(tokens, inner)
    shares, index, chosen = routing(tokens, EXPERTS, CHOSEN)
    given = shares.bfloat16() if every else chosen
    rank = torch.zeros(1, 1, dtype=torch.int32) if every else None
    weights = (made.words, made.down.words, given, index, every, rank, made.scales, made.down.scales)
    biases = (bfloat16(made.gate_up_bias), bfloat16(made.down_bias))
    return (bfloat16(made.tokens), *weights, *biases), {}, made.want(given.double().numpy())


MX: dict[str, Any] = {"target": "trn3", "tolerance": TOLERANCE, **SOURCE}
MX_REPAIRED: dict[str, Any] = {**MX, **REPAIRED}

for _grid, _all in itertools.product((1, 2), (False, True)):
    _name = f"moe_tkg MX[{_grid}, {'all' if _all else 'chosen'}, repaired]"

    @case("nki-library", _name, *TKG, grid=_grid, entry=on_words, **MX_REPAIRED)
    def _moe_tkg(_: ModuleType, every: bool = _all) -> Built:
        return decode(every, 512)


@case("nki-library", "moe_tkg MX[chosen, 256 inner, repaired]", *TKG, entry=on_words, refused="C16", **MX_REPAIRED)
def _moe_tkg_narrow(_: ModuleType) -> Built:
    """Rows that nobody wrote meet weights of 0, "so the garbage does not matter": it does if it is NaN or infinite."""
    return decode(False, 256)


@case("nki-library", "moe_tkg MX[all, 256 inner, repaired]", *TKG, entry=on_words, refused="C7: memset 0.0", **MX_REPAIRED)
def _moe_tkg_narrow_all(_: ModuleType) -> Built:
    """memset of a uint8 scale with 0.0; the value of an integer tile is an int."""
    return decode(True, 256)


def prefill(module: ModuleType, inner: int, dtype: str = "float8_e4m3fn_x4", skip: bool = False, **settings: Any) -> Built:
    """Blocks of 256 rows; skipped padding has the token -1, other padding a row of zeros at the end."""
    torch = torch_module()
    tokens = 384
    made = mixture(tokens, inner, dtype)
    chosen = routing(tokens, EXPERTS, CHOSEN)[2].bfloat16()
    rows, owners = blocks(chosen)
    x, shares = bfloat16(made.tokens), chosen
    if skip:
        rows = torch.where(rows == tokens, -1, rows)
    else:
        x, shares = (torch.cat([t, t[:1] * 0]) for t in (x, shares))
    settings |= {
        "gate_and_up_proj_bias": bfloat16(made.gate_up_bias),
        "down_proj_bias": bfloat16(made.down_bias),
        "gate_up_proj_scale": made.scales,
        "down_proj_scale": made.down.scales,
        "block_size": BLOCK,
        "skip_dma": module.SkipMode(skip, False),
        "expert_affinities_scaling_mode": module.ExpertAffinityScaleMode.POST_SCALE,
        "activation_function": module.ActFnType.SiLU,
    }
    args = (x, shares.reshape(-1, 1), made.words, made.down.words, rows, owners)
    want = made.want(chosen.double().numpy())
    return args, settings, lambda got: (got[:, :tokens].double().sum(0), want)


ON_BLOCK = ("nkilib.core.moe.moe_cte.bwmm_shard_on_block_mx", "bwmm_shard_on_block_mx")
ON_I = ("nkilib.core.moe.moe_cte.bwmm_shard_on_I_mx", "blockwise_mm_shard_intermediate_mx")

for _dtype in FORMATS:

    @case("nki-library", f"bwmm_shard_on_block_mx[{_dtype}]", *ON_BLOCK, grid=2, **MX)
    def _on_block(module: ModuleType, dtype: str = _dtype) -> Built:
        return prefill(module, 512, dtype, weight_dtype=dtype)


@case("nki-library", "bwmm_shard_on_block_mx[256 inner]", *ON_BLOCK, grid=2, refused="C16", **MX)
def _on_block_narrow(module: ModuleType) -> Built:
    """Rows that nobody wrote meet weights of 0, as in moe_tkg."""
    return prefill(module, 256)


@case("nki-library", "bwmm_shard_on_block_mx[skipping]", *ON_BLOCK, grid=2, refused="C25: oob_mode.skip", **MX)
def _on_block_skipping(module: ModuleType) -> Built:
    """oob_mode.skip on a DMA whose addresses are all static; it is for indirect ones."""
    return prefill(module, 512, skip=True)


@case("nki-library", "bwmm_shard_on_block_mx[dynamic]", *ON_BLOCK, grid=2, refused="TypeError: a register was used", **MX)
def _on_block_dynamic(module: ModuleType) -> Built:
    """`while register:` belongs to the parser front end, which does not take the kernel's `is`; 0.7 has nl.while_loop."""
    conditions = torch_module().tensor([1, 1, 1, 1, 0, 0], dtype=torch_module().int32)
    return prefill(module, 512, conditions=conditions, n_static_blocks=2)


@case("nki-library", "bwmm_shard_on_I_mx", *ON_I, grid=2, refused="C21", **MX)
def _on_inner(module: ModuleType) -> Built:
    """Both cores zero the whole output with no barrier between, as in moe_cte."""
    return prefill(module, 1024)
