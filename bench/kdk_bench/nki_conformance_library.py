"""Cases of nki_conformance from nki-library, compared with the torch references that lie beside its kernels."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def section_fields() -> Iterator[None]:
    """SectionParams with annotated fields, for one case: without, Python's dataclass gives it a constructor of no arguments.

    The parser front end would write one, but the kernel uses `is`, which that does not take.
    """
    module = sys.modules["nkilib.core.attention.attention_cte"]
    original = module.SectionParams
    fields = {name: None for name in vars(original) if "section" in name}
    module.SectionParams = type("SectionParams", (module.nl.NKIObject,), fields)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.SectionParams = original  # type: ignore[attr-defined]


for _grid, _window in ((0, None), (2, None), (2, 128)):

    @case(
        "nki-library",
        f"attention_cte[{_grid or 1}, window {_window}, SectionParams annotated]",
        "nkilib.core.attention.attention_cte",
        "attention_cte",
        grid=_grid,
        tolerance=BF16,
        around=section_fields,
        **SOURCE,
    )
    def _attention(_: ModuleType, window: int | None = _window) -> Built:
        torch = torch_module()
        q, k, v = (tensor(2, 512, 128, seed=i, dtype="bfloat16") for i in range(3))
        q = q / 8
        scores = q.double() @ k.double().transpose(1, 2)
        row, column = torch.arange(512)[:, None], torch.arange(512)[None]
        hidden = (column > row) | (column <= row - window if window else torch.zeros(1, dtype=torch.bool))
        want = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v.double()
        return (q, k.transpose(1, 2).contiguous(), v), {"sliding_window": window}, want


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
    refused="AttributeError",
    **SOURCE,
)
def _mxfp_load(_: ModuleType) -> Built:
    """Calls nl.range, which the current API does not have."""
    return (tensor(128, 1024, dtype="bfloat16"),), {}, None


@case("nki-library", "attention_bwd[2]", "nkilib.core.attention.attention_bwd", "attention_bwd", grid=2, tolerance=BF16, **SOURCE)
@case("nki-library", "attention_bwd", "nkilib.core.attention.attention_bwd", "attention_bwd", tolerance=BF16, **SOURCE)
def _attention_backward(module: ModuleType) -> Built:
    q, k, v, dy = (tensor(1, 2, 128, 512, seed=i) for i in range(4))
    o, lse, _ = reference(module, "attention_bwd_torch", "compute_o_lse")(q, k, v)
    want = reference(module, "attention_bwd_torch", "attention_bwd_torch_ref")(
        q, k, v, o, dy, lse, use_causal_mask=True, mixed_precision=True
    )
    return (q, k, v, o, dy, lse), {"use_causal_mask": True, "mixed_precision": True}, want


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


@case(
    "nki-library",
    "router_topk",
    "nkilib.core.router_topk.router_topk",
    "router_topk",
    refused="ModuleNotFoundError",
    **SOURCE,
)
def _router(_: ModuleType) -> Built:
    """Imports neuronxcc.nki.typing, which NKI 0.4 removed."""
    return (), {}, None


@case("nki-library", "rotational_topk", "nkilib.core.topk.rotational_topk", "rotational_topk", **SOURCE)
def _rotational_topk(module: ModuleType) -> Built:
    torch = torch_module()
    x = tensor(8, 4096)
    topk = module.create_topk_config(inp_shape=(8, 1, 4096), inp_dtype="float32", k=64, sorted=True, num_programs=1)
    config = module.create_rotational_topk_config(inp_shape=(8, 4096), topk_config=topk)
    config = module.prepare_rotational_constants(config)
    values, indices = torch.topk(x, 64)
    return (x, config), {}, (values, indices)


def decode_attention(module: ModuleType) -> Any:
    """attention_tkg with queries and keys in SBUF, which it asks for where it does not rotate them, and its own allocator."""
    import nki.isa as nisa  # type: ignore[import-not-found]
    import nki.language as nl  # type: ignore[import-not-found]

    utilities = {name: importlib.import_module(f"nkilib.core.utils.{name}") for name in ("allocator", "logging")}

    def attention(q: Any, k: Any, v: Any, k_prior: Any, v_prior: Any, mask: Any, config: Any) -> Any:
        out = nl.ndarray((config.bs, config.q_head, config.d_head, config.s_active), dtype=q.dtype, buffer=nl.shared_hbm)
        memory = utilities["allocator"].SbufManager(0, 200 * 1024, utilities["logging"].Logger("attention_tkg"))
        memory.open_scope()
        q_here, k_here = (memory.alloc_stack(t.shape, dtype=t.dtype, buffer=nl.sbuf) for t in (q, k))
        nisa.dma_copy(dst=q_here, src=q)
        nisa.dma_copy(dst=k_here, src=k)
        module.attention_tkg(q_here, k_here, v, k_prior, v_prior, mask, out, config, memory)
        memory.close_scope()
        return out

    return attention


for _batch, _heads, _new, _prior, _transposed, _grid in (
    (2, 4, 1, 256, True, 1),
    (2, 4, 1, 256, False, 1),
    (2, 4, 1, 256, True, 2),
    (1, 8, 4, 512, True, 2),
):

    @case(
        "nki-library",
        f"attention_tkg[{_grid}, batch {_batch}, {_heads} heads, {_new} new, {'keys transposed' if _transposed else 'keys in rows'}]",
        "nkilib.core.attention.attention_tkg",
        "attention_tkg",
        grid=_grid,
        tolerance=BF16,
        entry=decode_attention,
        **SOURCE,
    )
    def _attention_decode(
        module: ModuleType,
        batch: int = _batch,
        heads: int = _heads,
        new: int = _new,
        prior: int = _prior,
        transposed: bool = _transposed,
    ) -> Built:
        """The last positions of the cache's length stand for the new tokens; of the others the mask hides some."""
        torch = torch_module()
        q = tensor(batch, 128, heads, new, dtype="bfloat16") / 8
        k, v = tensor(batch, 128, new, seed=1, dtype="bfloat16"), tensor(batch, 1, new, 128, seed=2, dtype="bfloat16")
        k_prior, v_prior = (tensor(batch, 1, prior, 128, seed=i, dtype="bfloat16") for i in (3, 4))
        visible = torch.zeros(prior, batch, heads, new, dtype=torch.uint8)
        for b in range(batch):
            visible[: prior // 2 + 5 * b, b] = 1
        for i in range(new):
            visible[prior - new : prior - new + i + 1, :, :, i] = 1
        keys = torch.cat([k_prior[:, 0, : prior - new].transpose(1, 2), k], -1).double()
        values = torch.cat([v_prior[:, 0, : prior - new], v[:, 0]], 1).double()
        scores = torch.einsum("bdhs,bdp->bhsp", q.double(), keys)
        scores = scores.masked_fill(visible.permute(1, 2, 3, 0) == 0, float("-inf"))
        want = torch.einsum("bhsp,bpd->bhds", torch.softmax(scores, -1), values)
        config = module.AttnTKGConfig(
            bs=batch,
            q_head=heads,
            s_active=new,
            curr_sprior=prior,
            full_sprior=prior,
            d_head=128,
            tp_k_prior=not transposed,
            strided_mm1=transposed,
            qk_in_sb=True,
        )
        flat = (q.permute(1, 0, 2, 3).reshape(128, -1).contiguous(), k.permute(1, 0, 2).reshape(128, -1).contiguous())
        cache = k_prior.transpose(2, 3).contiguous() if transposed else k_prior
        return (*flat, v, cache, v_prior, visible, config), {}, want
