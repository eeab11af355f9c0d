"""TensorE: products of every dtype pair, array tiles, transposes that move bits."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nki.kit import loaded, psum, refused, sbuf, simulate, stored, values

QUICK = settings(max_examples=8, deadline=None)
NARROW = ["bfloat16", "float16", "float8_e4m3", "float8_e5m2"]


@QUICK
@given(k=st.integers(1, 128), m=st.integers(1, 128), n=st.integers(1, 512), seed=st.integers(0, 99),
       a=st.sampled_from(NARROW), b=st.sampled_from(NARROW))  # fmt: skip
def test_products_of_narrow_dtypes(k, m, n, seed, a, b):
    rng = np.random.default_rng(seed)
    x, y = values(rng, (k, m), a), values(rng, (k, n), b)

    def kernel(x, y):
        out = psum((m, n))
        nisa.nc_matmul(out, loaded(x), loaded(y))
        return stored(out)

    want = x.astype(np.float64).T @ y.astype(np.float64)
    scale = np.abs(x.astype(np.float64)).T @ np.abs(y.astype(np.float64))
    assert (np.abs(simulate(kernel, x, y) - want) <= scale * k * 2**-24 + 1e-30).all()


def test_several_free_dimensions_are_flattened():
    rng = np.random.default_rng(0)
    x, y = values(rng, (32, 2, 6), "bfloat16"), values(rng, (32, 4, 5), "bfloat16")

    def kernel(x, y):
        out = psum((12, 4, 5))
        nisa.nc_matmul(out, loaded(x), loaded(y))
        return stored(out)

    want = np.einsum("kab,kcd->abcd", x.astype(np.float64), y.astype(np.float64)).reshape(12, 4, 5)
    np.testing.assert_allclose(simulate(kernel, x, y), want, rtol=1e-5, atol=1e-4)


def test_tiles_of_the_array():
    rng = np.random.default_rng(0)
    x, y = values(rng, (128, 64), "bfloat16"), values(rng, (128, 100), "bfloat16")

    def kernel(x, y):
        left, right, outs = loaded(x), loaded(y), []
        for first in (0, 64):
            rows, out = slice(first, first + 64), psum((64, 100))
            nisa.nc_matmul(out, left[rows], right[rows], tile_position=(first, 0), tile_size=(64, 128))
            outs.append(stored(out))
        return tuple(outs)

    for i, got in enumerate(simulate(kernel, x, y)):
        half = slice(64 * i, 64 * i + 64)
        np.testing.assert_allclose(got, x[half].astype(np.float64).T @ y[half].astype(np.float64), rtol=1e-5, atol=1e-4)
    with refused("C8"):  # 128 partitions do not fit 64 rows
        simulate(lambda x, y: nisa.nc_matmul(psum((64, 100)), loaded(x), loaded(y), tile_position=(0, 0), tile_size=(64, 128)), x, y)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
@pytest.mark.parametrize("engine", ["tensor", "vector"])
def test_transposes_move_bits(dtype, engine):
    shape = (32, 5, 6) if engine == "vector" else (100, 8, 15)
    rng = np.random.default_rng(0)
    size = np.dtype("uint16" if dtype == "bfloat16" else dtype).itemsize
    bits = rng.integers(0, 1 << (8 * size), shape, np.uint64).astype(f"u{size}")

    def kernel(x):
        tile = loaded(x).view(dtype)
        width = shape[1] * shape[2]
        out = (psum if engine == "tensor" else sbuf)((width, shape[0]), dtype)
        nisa.nc_transpose(out, tile, engine=getattr(nisa.engine, engine))
        return stored(stored_bits(out, f"uint{8 * size}"))

    got = simulate(kernel, bits)
    np.testing.assert_array_equal(got, bits.reshape(shape[0], -1).T)


def stored_bits(tile, dtype):
    copy = sbuf(tile.shape, tile.dtype)
    nisa.tensor_copy(copy, tile)
    return copy.view(dtype)


def test_the_engine_of_a_transpose_follows_the_memories():
    def kernel(x):
        tile = loaded(x)
        nisa.nc_transpose(psum((16, 16)), tile)
        nisa.nc_transpose(sbuf((16, 16)), tile)
        return stored(tile)

    from kdk.backends.nki import emulator

    sim = emulator.simulate(kernel)
    sim(np.ones((16, 16), np.float32))
    assert [r.engine for r in sim.trace if r.op == "nc_transpose"] == ["tensor", "vector"]


def test_is_transpose_orders_columns_by_the_permutation():
    x = values(np.random.default_rng(0), (16, 8), "bfloat16")
    x[3, 2] = np.nan
    order = np.random.default_rng(1).permutation(16)
    permutation = np.eye(16, dtype=np.float32)[:, order].astype(x.dtype)

    def kernel(x, p):
        out = psum((8, 16), "bfloat16")
        nisa.nc_matmul(out, loaded(x), loaded(p), is_transpose=True)
        return stored(out)

    got = simulate(kernel, x, permutation)
    np.testing.assert_array_equal(got.view(np.uint16), np.ascontiguousarray(x.T[:, order]).view(np.uint16))


def test_identity_of_the_language_transposes():
    x = values(np.random.default_rng(0), (16, 8), "float32")

    def kernel(x):
        out = psum((8, 16))
        nisa.nc_matmul(out, loaded(x), nl.shared_identity_matrix(16, dtype=nl.float32))
        return stored(out)

    np.testing.assert_array_equal(simulate(kernel, x), x.T)
