"""Cases of nki_conformance: the feed-forward blocks of nki-library, called as its own entry would call them.

That entry, mlp.py, has lines of prose after its docstring and does not compile.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from kdk_bench.nki_conformance_cases import Built, case
from kdk_bench.nki_conformance_library import BF16, SOURCE, tensor, torch_module
from kdk_bench.nki_conformance_moe import REPAIRED
from kdk_bench.nki_conformance_mx import MX_REPAIRED, bfloat16, packed

WIDTH, INNER = 512, 512


def library(name: str) -> ModuleType:
    return importlib.import_module(f"nkilib.core.{name}")


@case("nki-library", "mlp", "nkilib.core.mlp.mlp", "mlp", refused="IndentationError: mlp.py", **SOURCE)
def _mlp(_: ModuleType) -> Built:
    """Its file has prose after the end of its docstring: not Python."""
    return (), {}, None


def block(function: str) -> Callable[[ModuleType], Callable[..., Any]]:
    """A kernel that fills in the library's parameters and allocates the output."""

    def entry(module: ModuleType) -> Callable[..., Any]:
        import nki.language as nl  # type: ignore[import-not-found]

        def mlp(x: Any, gate: Any, up: Any, down: Any, weight: Any, norm: Any) -> Any:
            parameters = library("mlp.mlp_parameters").MLPParameters(
                x, gate, up, down, normalization_weights_tensor=weight, normalization_type=norm
            )
            out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
            memory = {}
            if function == "mlp_tkg":
                logger = library("utils.logging").Logger("mlp")
                memory = {"sbm": library("utils.allocator").SbufManager(0, 200 * 1024, logger)}
            getattr(module, function)(parameters, out, None, **memory)
            return out

        return mlp

    return entry


def feed_forward(tokens: int, norm: str) -> Built:
    torch = torch_module()
    x, weight = tensor(1, tokens, WIDTH, dtype="bfloat16"), tensor(1, WIDTH, seed=4, dtype="bfloat16")
    gate, up = ((tensor(WIDTH, INNER, seed=i) / 16).bfloat16() for i in (1, 2))
    down = (tensor(INNER, WIDTH, seed=3) / 16).bfloat16()
    kind = library("utils.common_types").NormType[norm]
    hidden = x.double()
    if norm == "RMS_NORM":
        hidden = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    want = (torch.nn.functional.silu(hidden @ gate.double()) * (hidden @ up.double())) @ down.double()
    return (x, gate, up, down, weight if norm == "RMS_NORM" else None, kind), {}, want


for _grid, _norm in itertools.product((1, 2), ("NO_NORM", "RMS_NORM")):
    _plain: dict[str, Any] = {"grid": _grid, "tolerance": BF16, "entry": block("mlp_cte"), **SOURCE}
    _repaired: dict[str, Any] = {"grid": _grid, "tolerance": BF16, "entry": block("mlp_tkg"), **REPAIRED}
    _cte, _tkg = ("nkilib.core.mlp.mlp_cte.mlp_cte", "mlp_cte"), ("nkilib.core.mlp.mlp_tkg.mlp_tkg", "mlp_tkg")

    @case("nki-library", f"mlp_cte[{_grid}, {_norm}]", *_cte, **_plain)
    def _mlp_cte(_: ModuleType, norm: str = _norm) -> Built:
        return feed_forward(256, norm)

    @case("nki-library", f"mlp_tkg[{_grid}, {_norm}, repaired]", *_tkg, **_repaired)
    def _mlp_tkg(_: ModuleType, norm: str = _norm) -> Built:
        return feed_forward(4, norm)


def mx_block(module: ModuleType) -> Callable[..., Any]:
    """mlp_tkg_mx on words of 32 bits, viewed as what they pack."""
    import nki.language as nl

    def mlp_mx(x: Any, weights: Any, scales: Any, biases: Any) -> Any:
        views = [w.view("float8_e4m3fn_x4") for w in weights]
        parameters = library("mlp.mlp_parameters").MLPParameters(
            x,
            *views,
            quantization_type=library("utils.common_types").QuantizationType.MX,
            gate_w_scale=scales[0],
            up_w_scale=scales[1],
            down_w_scale=scales[2],
            gate_proj_bias_tensor=biases[0],
            up_proj_bias_tensor=biases[1],
            down_proj_bias_tensor=biases[2],
        )
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        module.mlp_tkg_mx(parameters, out, None)
        return out

    return mlp_mx


for _grid in (1, 2):
    _name = f"mlp_tkg_mx[{_grid}, repaired]"

    @case("nki-library", _name, "nkilib.core.mlp.mlp_tkg.mlp_tkg_mx", "mlp_tkg_mx", grid=_grid, entry=mx_block, **MX_REPAIRED)
    def _mlp_mx(_: ModuleType) -> Built:
        rng, width, inner, dtype = np.random.default_rng(0), 1024, 1024, "float8_e4m3fn_x4"
        x = rng.integers(-8, 9, (1, 4, width)) / 4
        gate, up = (packed(width, inner, seed, dtype, quarters=True) for seed in (1, 2))
        down = packed(inner, width, 3, dtype)
        biases = [rng.integers(-8, 9, (128, inner // 512, 4)) / 8 for _ in range(2)]
        biases.append(rng.integers(-8, 9, (1, width)) / 8)
        flat = [b.transpose(1, 2, 0).reshape(inner) for b in biases[:2]]
        g, u = (x @ w.exact[0] + b for w, b in zip((gate, up), flat))
        want = (g / (1 + np.exp(-g)) * u) @ down.exact[0] + biases[2]
        weights = tuple(w.words[0] for w in (gate, up, down))
        scales = tuple(w.scales[0] for w in (gate, up, down))
        return (bfloat16(x), weights, scales, tuple(map(bfloat16, biases))), {}, want
