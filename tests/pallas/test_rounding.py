"""A value that a kernel rounds is rounded, whatever XLA's libraries for CPUs make of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdk.backends.pallas.launch import prepare

pytest.importorskip("jax", reason="jax is the simulator")
prepare()
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402

from kdk.backends.pallas.simulate import run_simulated  # noqa: E402


def sums_of_rounded(x: jax.Array, g: jax.Array, *, interpret: Any = False) -> jax.Array:
    def kernel(x: Any, g: Any, out: Any) -> None:
        stored = jnp.where(x[...] > 0, x[...] * g[...], 0.0).astype(jnp.bfloat16)
        out[...] = jnp.sum(stored.astype(jnp.float32), axis=0, keepdims=True)

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((1, x.shape[1]), jnp.float32), interpret=interpret)(x, g)


def test_a_sum_of_values_rounded_to_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(32, 1024, generator=generator), torch.randn(32, 1, generator=generator)
    rounded = torch.where(x > 0, x * g, 0.0).bfloat16().double().sum(0, keepdim=True)
    got = run_simulated(sums_of_rounded, (x, g), "v6e")
    assert torch.allclose(got.double(), rounded, rtol=1e-6, atol=1e-6)
