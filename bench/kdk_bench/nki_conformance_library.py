"""Cases of nki_conformance from nki-library, compared with the torch references that lie beside its kernels."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from kdk_bench.nki_conformance_cases import Built, case, normal

SOURCE = {"package": "src/nkilib_src"}
BF16 = 2**-6  # tolerance where intermediate results are bfloat16, of the largest value


def torch_module() -> Any:
    import torch

    return torch


def tensor(*shape: int, seed: int = 0, dtype: str = "float32") -> Any:
    torch = torch_module()
    return torch.from_numpy(normal(*shape, seed=seed)).to(getattr(torch, dtype))


def reference(module: ModuleType, name: str, function: str) -> Any:
    """A torch reference from the package of the kernel's file."""
    package = module.__name__.rsplit(".", 1)[0]
    return getattr(importlib.import_module(f"{package}.{name}"), function)


@case("nki-library", "cumsum", "nkilib.core.cumsum.cumsum", "cumsum", **SOURCE)
def _cumsum(module: ModuleType) -> Built:
    x = tensor(150, 2500)
    return (x,), {}, reference(module, "cumsum_torch", "cumsum_torch_ref")(x.double())


for _grid in (1, 2):

    @case("nki-library", f"cascaded_max[{_grid}]", "nkilib.core.max.cascaded_max", "cascaded_max", grid=_grid, **SOURCE)
    def _cascaded_max(module: ModuleType) -> Built:
        x = tensor(4, 1, 8192)
        return (x,), {}, reference(module, "cascaded_max_torch", "cascaded_max_torch_ref")(x)

    @case("nki-library", f"RoPE[{_grid}]", "nkilib.core.embeddings.rope", "RoPE", grid=_grid, **SOURCE)
    def _rope(module: ModuleType, shard: bool = _grid == 2) -> Built:
        x, cos, sin = tensor(128, 2, 4, 256), tensor(64, 2, 256, seed=1), tensor(64, 2, 256, seed=2)
        want = reference(module, "rope_torch", "rope_torch_ref")(x, cos, sin, lnc_shard=shard)
        return (x, cos, sin), {"lnc_shard": shard}, want

    @case("nki-library", f"rope_hf[{_grid}]", "nkilib.core.embeddings.rope_hf", "rope_hf", grid=_grid, **SOURCE)
    def _rope_hf(module: ModuleType) -> Built:
        torch = torch_module()
        q, k = tensor(1, 4, 256, 128), tensor(1, 2, 256, 128, seed=1)
        cos, sin = tensor(1, 256, 128, seed=2), tensor(1, 256, 128, seed=3)
        outs = torch.zeros_like(q), torch.zeros_like(k)
        want = reference(module, "rope_hf_torch", "rope_hf_torch_ref")(q, k, outs[0], outs[1], cos, sin)
        return (q, k, *outs, cos, sin), {}, want

    @case(
        "nki-library",
        f"find_nonzero_indices[{_grid}]",
        "nkilib.core.subkernels.find_nonzero_indices",
        "find_nonzero_indices",
        grid=_grid,
        **SOURCE,
    )
    def _find_nonzero(module: ModuleType) -> Built:
        x = (tensor(512, 16) > 0.5).float()
        return (x,), {}, reference(module, "find_nonzero_indices_torch", "find_nonzero_indices_torch_ref")(x)

    @case(
        "nki-library",
        f"cross_entropy_forward[{_grid}]",
        "nkilib.experimental.loss.cross_entropy",
        "cross_entropy_forward",
        grid=_grid,
        **SOURCE,
    )
    def _cross_entropy(module: ModuleType) -> Built:
        logits = tensor(128, 4096)
        targets = torch_module().arange(128, dtype=torch_module().int32) * 31
        want = torch_module().nn.functional.cross_entropy(logits.double(), targets.long(), reduction="none")
        lse = torch_module().logsumexp(logits.double(), -1)
        return (logits, targets), {"chunk_size": 2048, "dtype": "float32"}, (want, lse)

    @case(
        "nki-library",
        f"cross_entropy_backward[{_grid}]",
        "nkilib.experimental.loss.cross_entropy",
        "cross_entropy_backward",
        grid=_grid,
        **SOURCE,
    )
    def _cross_entropy_backward(module: ModuleType) -> Built:
        torch = torch_module()
        logits = tensor(128, 4096)
        targets = torch.arange(128, dtype=torch.int32) * 31
        lse = torch.logsumexp(logits, -1)
        want = (torch.softmax(logits.double(), -1) - torch.nn.functional.one_hot(targets.long(), 4096)) / 128
        return (logits, targets, lse), {"chunk_size": 2048, "dtype": "float32", "inplace": False}, want


@case(
    "nki-library",
    "dynamic_elementwise_add",
    "nkilib.experimental.dynamic_shapes.dynamic_elementwise_add",
    "dynamic_elementwise_add",
    frontend="parser",
    tolerance=BF16,
    **SOURCE,
)
def _dynamic_add(_: ModuleType) -> Built:
    """Uses nl.dynamic_range, which only the parser front end has."""
    torch = torch_module()
    a, b = tensor(256, 512, dtype="bfloat16"), tensor(256, 512, seed=1, dtype="bfloat16")
    return (a, b, torch.tensor([[2]], dtype=torch.int32)), {}, a.double() + b.double()


@case(
    "nki-library",
    "find_nonzero_indices_with_count",
    "nkilib.experimental.benchmark.find_nonzero_indices_with_count",
    "find_nonzero_indices_with_count",
    **SOURCE,
)
def _find_with_count(_: ModuleType) -> Built:
    x = (normal(1, 200) > 0.5).astype(np.float32)
    found = np.flatnonzero(x)
    want = np.full((1, 201), -1, np.int32)
    want[0, : len(found)], want[0, -1] = found, len(found)
    return (x,), {}, want


@case("nki-library", "rmsnorm_quant", "nkilib.core.rmsnorm.rmsnorm_quant", "rmsnorm_quant_kernel", tolerance=2**-4, **SOURCE)
def _rmsnorm_quant(module: ModuleType) -> Built:
    """Rows of float8 with their scale, a float32, in the last four bytes; float8 rounds to a sixteenth of the value."""
    kargs = module.RmsNormQuantKernelArgs(lower_bound=0.0, norm_type=module.NormType.RMS_NORM, eps=1e-6)
    x, weight = normal(1, 256, 512, dtype=ml_dtypes.bfloat16), normal(512, seed=1, dtype=ml_dtypes.bfloat16)
    exact = x.astype(np.float64)
    want = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)

    def dequantised(got: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale = np.ascontiguousarray(got[..., 512:]).view(np.float32)
        return got[..., :512].astype(np.float64) * scale, want

    return (x, weight, kargs), {}, dequantised


for _stride, _dilation in ((1, 1), (2, 1), (1, 3)):

    @case(
        "nki-library",
        f"conv1d[stride {_stride}, dilation {_dilation}]",
        "nkilib.experimental.conv.conv1d",
        "conv1d",
        tolerance=1e-4,
        **SOURCE,
    )
    def _conv1d(_: ModuleType, stride: int = _stride, dilation: int = _dilation) -> Built:
        x, filters, bias = tensor(2, 64, 200), tensor(3, 64, 96, seed=1), tensor(96, seed=2)
        settings = {"stride": stride, "dilation": dilation}
        want = torch_module().nn.functional.conv1d(x.double(), filters.permute(2, 1, 0).double(), bias.double(), padding=1, **settings)
        return (x, filters, bias), {"padding": (1, 1), **settings}, want


@case(
    "nki-library",
    "output_projection_cte",
    "nkilib.core.output_projection.output_projection_cte.output_projection_cte",
    "output_projection_cte",
    tolerance=BF16,
    **SOURCE,
)
def _output_projection(_: ModuleType) -> Built:
    attention, weight = tensor(1, 4, 128, 256, dtype="bfloat16"), tensor(512, 1024, seed=1, dtype="bfloat16")
    want = attention.double().permute(0, 3, 1, 2).reshape(1, 256, 512) @ weight.double()
    return (attention, weight), {}, want


for _norm in ("NO_NORM", "RMS_NORM", "LAYER_NORM"):

    @case("nki-library", f"qkv[{_norm}]", "nkilib.core.qkv.qkv", "qkv", tolerance=BF16, **SOURCE)
    def _qkv(module: ModuleType, norm: str = _norm) -> Built:
        torch = torch_module()
        hidden, weight = tensor(1, 512, 1024, dtype="bfloat16"), tensor(1024, 768, seed=1, dtype="bfloat16")
        gamma, beta = tensor(1, 1024, seed=2, dtype="bfloat16"), tensor(1, 1024, seed=3, dtype="bfloat16")
        x, settings = hidden.double(), {"fused_norm_type": getattr(module.NormType, norm)}
        if norm == "RMS_NORM":
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma.double()
            settings |= {"gamma_norm_weights": gamma}
        elif norm == "LAYER_NORM":
            x = torch.nn.functional.layer_norm(x, (1024,), gamma[0].double(), beta[0].double(), 1e-6)
            settings |= {"gamma_norm_weights": gamma, "layer_norm_bias": beta}
        return (hidden, weight), settings, x @ weight.double()


@case(
    "nki-library",
    "mxfp_load_performance_wrapper",
    "nkilib.experimental.mxfp_subkernels.mxfp_load_utils",
    "mxfp_load_performance_wrapper",
    target="trn3",
    refused="AttributeError: 'range'",
    **SOURCE,
)
def _mxfp_load(_: ModuleType) -> Built:
    """Calls nl.range, which the current API does not have."""
    return (tensor(128, 1024, dtype="bfloat16"),), {}, None


@case(
    "nki-library",
    "output_projection_tkg",
    "nkilib.core.output_projection.output_projection_tkg",
    "output_projection_tkg",
    tolerance=BF16,
    **SOURCE,
)
def _output_projection_decode(module: ModuleType) -> Built:
    attention, weight = tensor(128, 4, 4, 1, dtype="bfloat16"), tensor(512, 1024, seed=1, dtype="bfloat16")
    want = attention.double().permute(1, 3, 2, 0).reshape(4, 512) @ weight.double()
    return (attention, weight), {}, want


@case(
    "nki-library",
    "depthwise_conv1d",
    "nkilib.experimental.conv.depthwise_conv1d",
    "depthwise_conv1d_implicit_gemm",
    grid=2,
    tolerance=1e-4,
    **SOURCE,
)
def _depthwise(_: ModuleType) -> Built:
    x, filters = tensor(1, 8, 1, 200), tensor(8, 1, 1, 5, seed=1)
    want = torch_module().nn.functional.conv2d(x.double(), filters.double(), groups=8)
    return (x, filters), {"feature_group_count": 8}, want


@case("nki-library", "indexed_flatten", "nkilib.core.subkernels.indexed_flatten", "indexed_flatten", grid=2, **SOURCE)
def _indexed_flatten(module: ModuleType) -> Built:
    torch = torch_module()
    x = torch.arange(4 * 2048, dtype=torch.int32).reshape(4, 2048)
    offsets = torch.tensor([0, 16, 32, 48], dtype=torch.int32)
    want = reference(module, "indexed_flatten_torch", "indexed_flatten_torch_ref")(x, 128, 8192, offsets)
    return (x, 128, 8192, offsets), {}, want


@case("nki-library", "rotational_topk", "nkilib.core.topk.rotational_topk", "rotational_topk", **SOURCE)
def _rotational_topk(module: ModuleType) -> Built:
    torch = torch_module()
    x = tensor(8, 4096)
    topk = module.create_topk_config(inp_shape=(8, 1, 4096), inp_dtype="float32", k=64, sorted=True, num_programs=1)
    config = module.create_rotational_topk_config(inp_shape=(8, 4096), topk_config=topk)
    config = module.prepare_rotational_constants(config)
    values, indices = torch.topk(x, 64)
    return (x, config), {}, (values, indices)
