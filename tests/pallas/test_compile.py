"""Every Pallas kernel through the TPU's own compiler, and what that compiler refuses."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

pytest.importorskip("libtpu", reason="libtpu is the compiler")
from tests.pallas.described import KERNELS, call, kernel

from kdk.backends import Compiled
from kdk.backends.pallas import LANGUAGE, SCOPED_VMEM
from kdk.backends.pallas.compile import compile_for, missing
from kdk.backends.pallas.launch import prepare
from kdk.registry import OPERATORS

prepare()
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402

TARGETS = ["v6e", *(pytest.param(target, marks=pytest.mark.slow) for target in ("v5e", "v5p", "tpu7x"))]


def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ["model", "odd"])
@pytest.mark.parametrize("name, direction", KERNELS)
def test_compiles(name: str, direction: str, case: str, target: str) -> None:
    function, args = call(name, direction, case)
    result = compile_for(function, args, target)
    assert result.outcome == "compiled", result.reason
    if result.reason:  # an XLA that cannot read its own program is no fault of the kernel
        assert result.reason.startswith("its optimised program cannot be read back: INTERNAL: RET_CHECK")
    else:
        assert 0 < result.resources["scoped_vmem_bytes"] <= result.resources["scoped_vmem_limit"]
        assert not result.exceeded
        assert "tpu_custom_call" in result.text, "a kernel, not XLA alone"


@pytest.mark.slow
@pytest.mark.parametrize("target", LANGUAGE.targets)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rms_norm_takes_only_rows_that_fit(direction: str, dtype: torch.dtype, target: str) -> None:
    module = kernel(OPERATORS["rms_norm"].op, direction)

    def args(H: int) -> tuple[Any, ...]:
        x, weight = meta(40, H, dtype=dtype), meta(H, dtype=dtype)
        return (x, weight, 1e-5, 0.0) if direction == "forward" else (x, x, weight, meta(40), 0.0, "x,weight")

    H = 128
    while module.supports(target, *args(H + 128)) is None:
        H += 128
    assert H >= 16384, "a model has such rows"
    result = compile_for(getattr(module, direction), args(H), target)
    assert (result.outcome, result.reason) == ("compiled", "")
    assert "H = " in module.supports(target, *args(H + 128))


# ---- planted refusals -------------------------------------------------------------------------------------------------


def copied(x: jax.Array, block: tuple[int, int], rows: int) -> jax.Array:
    def copy(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = x_ref[...]

    spec = pl.BlockSpec(block, lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(copy, out_shape=out, grid=(rows // block[0],), in_specs=[spec], out_specs=spec)(x)


def float16_dot(x: jax.Array) -> jax.Array:
    def dot(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = jnp.dot(x_ref[...], x_ref[...], preferred_element_type=jnp.float32).astype(jnp.float16)

    return pl.pallas_call(dot, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def sorting(x: jax.Array) -> jax.Array:
    def kernel(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = jnp.sort(x_ref[...], axis=-1)

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_compiles_a_block_that_fits() -> None:
    result = compile_for(lambda x: copied(x, (512, 1024), 1024), (meta(1024, 1024),), "v6e")
    assert result.outcome == "compiled"
    assert result.resources["scoped_vmem_bytes"] == 2 * 2 * 512 * 1024 * 4, "a block in and one out, each twice"
    assert pickle.loads(pickle.dumps(result)) == result


def refused(result: Compiled) -> str:
    assert result.outcome == "refused", result
    assert "\n" not in result.reason and len(result.reason) <= 500
    assert result.text == ""
    return result.reason


def test_refuses_a_float16_dot() -> None:
    reason = refused(compile_for(float16_dot, (meta(256, 256, dtype=torch.float16),), "v6e"))
    assert "Mosaic: Invalid vector type for load" in reason
    assert "xf16>" in reason and "test_compile.py, line " in reason


def test_refuses_a_block_that_is_not_divisible() -> None:
    reason = refused(compile_for(lambda x: copied(x, (100, 100), 1000), (meta(1000, 1000),), "v6e"))
    assert "divisible by 8 and 128" in reason and "block_size=100" in reason


@pytest.mark.parametrize("target", LANGUAGE.targets)
def test_refuses_blocks_over_the_budget(target: str) -> None:
    reason = refused(compile_for(lambda x: copied(x, (1536, 2048), 3072), (meta(3072, 2048),), target))
    assert f"limit {SCOPED_VMEM[target] / 2**20:.2f}M exceeded" in reason


def test_refuses_a_primitive_that_mosaic_lacks() -> None:
    assert "lowering for tc: sort" in refused(compile_for(sorting, (meta(256, 256),), "v6e"))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_refuses_64_bits(dtype: torch.dtype) -> None:
    assert "64-bit" in refused(compile_for(lambda x: copied(x, (8, 128), 8), (meta(8, 128, dtype=dtype),), "v6e"))


def test_a_mistake_in_the_kernel_is_no_refusal() -> None:
    result = compile_for(lambda x: x + nothing, (meta(8, 128),), "v6e")  # type: ignore[name-defined]  # noqa: F821
    assert (result.outcome, result.reason) == ("failed", "NameError: name 'nothing' is not defined")


def test_missing_names_the_package_and_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "libtpu" else object())
    assert missing.__wrapped__() == "libtpu is not installed: pip install 'torch-kdk[tpu]' (libtpu exists for Linux on x86-64)"
