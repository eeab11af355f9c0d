"""Element-wise instructions against independent NumPy formulas, over random legal shapes and dtypes."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nki.kit import FLOATS, loaded, psum, rounded, run, sbuf, simulate, stored, values

QUICK = settings(max_examples=6, deadline=None)
shapes = st.tuples(st.integers(1, 128), st.integers(1, 40))
floats = st.sampled_from(FLOATS)
seeds = st.integers(0, 1000)


def f32(x):
    return x.astype(np.float32)


BINARY = {
    "add": (nl.add, np.add),
    "subtract": (nl.subtract, np.subtract),
    "multiply": (nl.multiply, np.multiply),
    "maximum": (nl.maximum, np.maximum),
    "minimum": (nl.minimum, np.minimum),
    "equal": (nl.equal, np.equal),
    "not_equal": (nl.not_equal, np.not_equal),
    "greater": (nl.greater, np.greater),
    "greater_equal": (nl.greater_equal, np.greater_equal),
    "less": (nl.less, np.less),
    "less_equal": (nl.less_equal, np.less_equal),
    "logical_and": (nl.logical_and, np.logical_and),
    "logical_or": (nl.logical_or, np.logical_or),
    "logical_xor": (nl.logical_xor, np.logical_xor),
}


@pytest.mark.parametrize("name", BINARY)
@QUICK
@given(shape=shapes, a=floats, b=floats, out=floats, seed=seeds)
def test_tensor_tensor(name, shape, a, b, out, seed):
    op, formula = BINARY[name]
    rng = np.random.default_rng(seed)
    x, y = values(rng, shape, a), values(rng, shape, b)
    y = np.where(rng.random(shape) < 0.3, x.astype(y.dtype), y)  # equal values, for the comparisons
    got = run(lambda dst, p, q: nisa.tensor_tensor(dst, p, q, op), x, y, out=(shape, out))
    np.testing.assert_array_equal(got, rounded(formula(f32(x), f32(y)), out))


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor"])
@QUICK
@given(shape=shapes, dtype=st.sampled_from(["int8", "uint8", "int16", "uint16", "int32", "uint32"]), seed=seeds)
def test_tensor_tensor_bits(name, shape, dtype, seed):
    rng = np.random.default_rng(seed)
    x, y = values(rng, shape, dtype), values(rng, shape, dtype)
    got = run(lambda dst, p, q: nisa.tensor_tensor(dst, p, q, getattr(nl, name)), x, y, out=(shape, dtype))
    np.testing.assert_array_equal(got, getattr(np, name)(x, y))


def test_int32_is_exact_on_gpsimd_and_goes_through_float32_on_vector():
    x = np.array([[(1 << 24) + 1, 2_000_000_001]], np.int32)
    zero = np.zeros_like(x)
    exact = run(lambda dst, p, q: nisa.tensor_tensor(dst, p, q, nl.add), x, zero, out=(x.shape, "int32"))
    np.testing.assert_array_equal(exact, x)
    vector = nisa.engine.vector
    coarse = run(lambda dst, p, q: nisa.tensor_tensor(dst, p, q, nl.add, engine=vector), x, zero, out=(x.shape, "int32"))
    np.testing.assert_array_equal(coarse, x.astype(np.float32).astype(np.int32))
    assert (coarse != x).any()


def test_power_runs_on_gpsimd():
    x = np.abs(values(np.random.default_rng(0), (8, 8))) + 0.5
    got = run(lambda dst, p, q: nisa.tensor_tensor(dst, p, q, nl.power), x, x, out=((8, 8), "float32"))
    np.testing.assert_allclose(got, x.astype(np.float64) ** x, rtol=1e-5)


@QUICK
@given(shape=shapes, dtype=floats, out=floats, seed=seeds, reverse=st.booleans())
def test_tensor_scalar_two_operators(shape, dtype, out, seed, reverse):
    rng = np.random.default_rng(seed)
    x, v = values(rng, shape, dtype), values(rng, (shape[0], 1))

    def issue(dst, p, q):
        nisa.tensor_scalar(dst, p, nl.subtract, 1.5, reverse0=reverse, op1=nl.multiply, operand1=q)

    first = 1.5 - f32(x) if reverse else f32(x) - np.float32(1.5)
    np.testing.assert_array_equal(run(issue, x, v, out=(shape, out)), rounded(first * v, out))


@QUICK
@given(shape=shapes, dtype=st.sampled_from(["uint8", "uint16", "uint32"]), distance=st.integers(0, 40), seed=seeds)
def test_shifts_are_logical(shape, dtype, distance, seed):
    x = values(np.random.default_rng(seed), shape, dtype)
    width = x.dtype.itemsize * 8
    got = run(lambda dst, p: nisa.tensor_scalar(dst, p, nl.right_shift, distance), x, out=(shape, dtype))
    np.testing.assert_array_equal(got, x.astype(np.uint64) >> distance if distance < width else 0)
    got = run(lambda dst, p: nisa.tensor_scalar(dst, p, nl.left_shift, distance), x, out=(shape, dtype))
    np.testing.assert_array_equal(got, (x.astype(np.uint64) << distance).astype(x.dtype) if distance < width else 0)


def test_right_shift_of_negative_numbers_fills_with_zeros():
    x = np.array([[-1, -8]], np.int32)
    got = run(lambda dst, p: nisa.tensor_scalar(dst, p, nl.right_shift, 1), x, out=((1, 2), "int32"))
    np.testing.assert_array_equal(got, (x.view(np.uint32) >> 1).view(np.int32))


def test_unary_operators_of_tensor_scalar():
    x = values(np.random.default_rng(0), (4, 9))
    got = run(lambda dst, p: nisa.tensor_scalar(dst, p, nl.abs, None), x, out=((4, 9), "float32"))
    np.testing.assert_array_equal(got, np.abs(x))
    got = run(lambda dst, p: nisa.tensor_scalar(dst, p, nl.rsqrt, 0), np.abs(x), out=((4, 9), "float32"))
    np.testing.assert_allclose(got, 1 / np.sqrt(np.abs(x).astype(np.float64)), rtol=1e-6)
    got = run(lambda dst, p: nisa.tensor_scalar(dst, p, nl.square, None), x, out=((4, 9), "float32"), target="trn3")
    np.testing.assert_array_equal(got, x * x)
    bits = values(np.random.default_rng(0), (4, 9), "int16")
    got = run(lambda dst, p: nisa.tensor_scalar(dst, p, nl.invert, None), bits, out=((4, 9), "int16"))
    np.testing.assert_array_equal(got, ~bits)


@QUICK
@given(shape=shapes, a=floats, b=floats, out=floats, seed=seeds)
def test_scalar_tensor_tensor(shape, a, b, out, seed):
    rng = np.random.default_rng(seed)
    x, y, v = values(rng, shape, a), values(rng, shape, b), values(rng, (shape[0], 1))

    def issue(dst, p, q, r):
        nisa.scalar_tensor_tensor(dst, p, nl.multiply, r, nl.subtract, q, reverse1=True)

    np.testing.assert_array_equal(run(issue, x, y, v, out=(shape, out)), rounded(f32(y) - f32(x) * v, out))


@QUICK
@given(
    shape=shapes,
    a=st.sampled_from(["float32", "bfloat16", "int8", "uint16"]),
    out=st.sampled_from(["float16", "int8", "uint8"]),
    seed=seeds,
)
def test_tensor_copy_casts_through_float32(shape, a, out, seed):
    x = values(np.random.default_rng(seed), shape, a, scale=100)
    got = run(lambda dst, p: nisa.tensor_copy(dst, p), x, out=(shape, out))
    np.testing.assert_array_equal(got, rounded(f32(x), out))


def test_tensor_copy_between_equal_dtypes_moves_bits():
    x = np.array([[0x7FC00001, 0xFFC0ABCD, 0x00000001]], np.uint32).view(np.float32)
    got = run(lambda dst, p: nisa.tensor_copy(dst, p), x, out=((1, 3), "float32"))
    np.testing.assert_array_equal(got.view(np.uint32), x.view(np.uint32))
    big = np.array([[(1 << 30) + 1]], np.int32)
    np.testing.assert_array_equal(run(lambda dst, p: nisa.tensor_copy(dst, p), big, out=((1, 1), "int32")), big)


def test_rounding_is_to_nearest_even_and_integers_saturate():
    x = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 300.0, -300.0]], np.float32)
    got = run(lambda dst, p: nisa.tensor_copy(dst, p), x, out=((1, 7), "int8"))
    np.testing.assert_array_equal(got, [[0, 2, 2, 0, -2, 127, -128]])
    x = np.array([[1 + 2**-8, 1 + 3 * 2**-8]], np.float32)  # halfway between two bfloat16 values
    got = run(lambda dst, p: nisa.tensor_copy(dst, p), x, out=((1, 2), "bfloat16"))
    np.testing.assert_array_equal(got.astype(np.float32), [[1, 1 + 2**-6]])


def test_memset_and_predicated_copy():
    rng = np.random.default_rng(0)
    x, old = values(rng, (5, 6)), values(rng, (5, 6))
    p = (rng.random((5, 6)) < 0.5).astype(np.uint8)

    def kernel(x, old, p, reverse):
        dst = loaded(old)
        nisa.tensor_copy_predicated(dst, loaded(x), loaded(p), reverse_pred=reverse)
        filled = sbuf((5, 6), "int16")
        nisa.memset(filled, -3)
        number = loaded(old)
        nisa.tensor_copy_predicated(number, 2.5, loaded(p))
        return stored(dst), stored(filled), stored(number)

    for reverse in (False, True):
        got, filled, number = simulate(kernel, x, old, p, reverse)
        np.testing.assert_array_equal(got, np.where((p != 0) ^ reverse, x, old))
        assert (filled == -3).all()
        np.testing.assert_array_equal(number, np.where(p, 2.5, old).astype(np.float32))


def test_reciprocal_and_psum_operands():
    x = values(np.random.default_rng(0), (6, 7)) + 3

    def kernel(x):
        left, dst = psum((6, 7)), psum((6, 7))
        nisa.tensor_copy(left, loaded(x))
        nisa.reciprocal(dst, left)
        return stored(dst)

    np.testing.assert_array_equal(simulate(kernel, x), 1 / x)


ACTIVATIONS = {
    "copy": lambda x: x,
    "exp": np.exp,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.where(x > 0, x, 0),
    "square": lambda x: x * x,
    "abs": np.abs,
    "sign": np.sign,
    "softplus": lambda x: np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "gelu_apprx_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_apprx_sigmoid": lambda x: x / (1 + np.exp(-1.702 * x)),
    "sin": np.sin,
    "arctan": np.arctan,
}
POSITIVE = {"log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: x**-0.5, "reciprocal": lambda x: 1 / x}


@pytest.mark.parametrize("name", [*ACTIVATIONS, *POSITIVE])
def test_activation_functions(name):
    x = np.clip(values(np.random.default_rng(0), (16, 33)), -1.4, 1.4)
    x = np.abs(x) + 0.1 if name in POSITIVE else x
    got = run(lambda dst, p: nisa.activation(dst, getattr(nl, name), p), x, out=((16, 33), "float32"))
    want = (ACTIVATIONS | POSITIVE)[name](x.astype(np.float64))
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gelu", "erf"])
def test_activation_functions_with_the_error_function(name):
    special = pytest.importorskip("scipy.special")
    x = values(np.random.default_rng(0), (16, 33))
    got = run(lambda dst, p: nisa.activation(dst, getattr(nl, name), p), x, out=((16, 33), "float32"))
    x64 = x.astype(np.float64)
    want = special.erf(x64) if name == "erf" else x64 * special.ndtr(x64)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_apprx_sigmoid", "erf"])
def test_derivatives_are_derivatives(name):
    x, h = values(np.random.default_rng(0), (16, 33)), 1e-2

    def kernel(x):
        tile, outs = loaded(x), []
        for shift in (h, -h):
            dst = sbuf(x.shape)
            nisa.activation(dst, getattr(nl, name), tile, bias=shift)
            outs.append(stored(dst))
        dst = sbuf(x.shape)
        nisa.activation(dst, getattr(nl, name + "_dx"), tile)
        return (*outs, stored(dst))

    above, below, slope = simulate(kernel, x)
    np.testing.assert_allclose(slope, (above.astype(np.float64) - below) / (2 * h), atol=2e-4)


@QUICK
@given(shape=shapes, dtype=floats, seed=seeds)
def test_activation_scale_bias_and_sum(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    x, scale, bias = values(rng, shape, dtype), values(rng, (shape[0], 1)), values(rng, (shape[0], 1))

    def issue(dst, total, p, s, b):
        nisa.activation(dst, nl.tanh, p, bias=b, scale=s, reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce)

    got, total = run(issue, x, scale, bias, out=[(shape, "float32"), ((shape[0], 1), "float32")])
    want = np.tanh(f32(x).astype(np.float64) * scale + bias)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(total[:, 0], want.sum(1), rtol=1e-4, atol=1e-4)


def test_activate2_and_prelu():
    x = values(np.random.default_rng(0), (8, 16))

    def issue(dst, slope, p):
        nisa.activate2(dst, nl.exp, p, imm0=0.5, imm1=1.0, op0=nl.multiply, op1=nl.subtract, reverse1=True)
        nisa.activate2(slope, nl.prelu, p, imm0=0.0, imm1=0.0, op0=nl.bypass, op1=nl.bypass, relu_param=0.25)

    got, slope = run(issue, x, out=[((8, 16), "float32")] * 2, target="trn3")
    np.testing.assert_allclose(got, np.exp(1 - 0.5 * x.astype(np.float64)), rtol=1e-6)
    np.testing.assert_array_equal(slope, np.where(x >= 0, x, x * np.float32(0.25)))


def test_dropout_and_rng():
    x = values(np.random.default_rng(0), (64, 256))

    def kernel(x):
        dst, bits, low = sbuf(x.shape), sbuf((64, 256), "uint32"), sbuf((64, 256), "uint8")
        nisa.dropout(dst, loaded(x), 0.25)
        nisa.rng(bits)
        nisa.rng(low, engine=nisa.engine.gpsimd)
        return stored(dst), stored(bits), stored(low)

    dropped, bits, low = simulate(kernel, x)
    kept = dropped != 0
    np.testing.assert_array_equal(dropped[kept], x[kept])
    assert abs(kept.mean() - 0.75) < 0.02
    assert abs(bits.astype(np.float64).mean() / 2**32 - 0.5) < 0.02 and abs(low.mean() / 255 - 0.5) < 0.02


def test_seeds_repeat_and_rand2_is_uniform():
    def kernel(seed):
        tile, outs = loaded(seed), []
        for _ in range(2):
            dst = sbuf((64, 256))
            nisa.set_rng_seed(tile)
            nisa.rand2(dst, -1.0, 3.0)
            outs.append(stored(dst))
        return tuple(outs)

    a, b = simulate(kernel, np.array([[7]], np.int32), target="trn3")
    np.testing.assert_array_equal(a, b)
    assert a.min() >= -1 and a.max() <= 3 and abs(a.mean() - 1) < 0.05


def test_random_state_is_stored_and_loaded():
    def kernel(seeds):
        state, bits = sbuf((128, 6), "uint32"), []
        for _ in range(2):
            nisa.rand_set_state(loaded(seeds))
            out = sbuf((128, 4), "uint32")
            nisa.rng(out, engine=nisa.engine.gpsimd)
            bits.append(stored(out))
        nisa.rand_set_state(loaded(seeds))
        nisa.rand_get_state(state)
        return stored(state), *bits

    seeds = np.random.default_rng(0).integers(0, 1 << 32, (128, 6), np.uint32)
    state, first, second = simulate(kernel, seeds)
    np.testing.assert_array_equal(state, seeds)
    np.testing.assert_array_equal(first, second)
