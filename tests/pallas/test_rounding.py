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


def product(a: jax.Array, b: jax.Array, precision: Any, *, interpret: Any = False) -> jax.Array:
    def kernel(a: Any, b: Any, out: Any) -> None:
        out[...] = jax.lax.dot_general(a[...], b[...], (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)

    shape = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.float32)
    return pl.pallas_call(kernel, out_shape=shape, interpret=interpret)(a, b)


@pytest.mark.parametrize("precision", [None, jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST])
def test_a_product_of_float32_is_one_pass_in_bfloat16_unless_it_asks_for_more(precision: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(8, 128, generator=generator), torch.randn(128, 128, generator=generator)
    in_float32, in_one_pass = a.double() @ b.double(), a.bfloat16().double() @ b.bfloat16().double()
    got = run_simulated(product, (a, b, precision), "v6e").double()
    wanted, other = (in_float32, in_one_pass) if precision == jax.lax.Precision.HIGHEST else (in_one_pass, in_float32)
    assert (got - wanted).abs().max() < 1e-4 < 1e-2 < (got - other).abs().max()


def test_programs_of_ones_own_are_left_alone() -> None:
    """Before and after a simulation: jax traces a jnp.dot once for all who use it."""
    a, b = jnp.full((8, 128), 1 + 2**-12), jnp.ones((128, 128))
    before = jnp.dot(a, b)
    run_simulated(product, (torch.ones(8, 128), torch.ones(128, 128), None), "v6e")
    assert before[0, 0] == jnp.dot(a, b)[0, 0] == 128 * (1 + 2**-12)
