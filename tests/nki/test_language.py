"""nki.language: functions on tiles and creation, against NumPy."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from tests.nki.kit import loaded, simulate, stored, values

X = values(np.random.default_rng(0), (16, 24))
Y = values(np.random.default_rng(1), (16, 24))


def on_tiles(function, *arrays):
    return simulate(lambda *inputs: stored(function(*[loaded(x) for x in inputs])), *arrays)


BINARY = [
    "add",
    "subtract",
    "multiply",
    "maximum",
    "minimum",
    "equal",
    "not_equal",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
]


@pytest.mark.parametrize("name", BINARY)
def test_binary_functions_of_tiles_and_numbers(name):
    formula = getattr(np, name)
    np.testing.assert_array_equal(on_tiles(getattr(nl, name), X, Y), formula(X, Y).astype(np.float32))
    np.testing.assert_array_equal(on_tiles(lambda x: getattr(nl, name)(x, 0.5), X), formula(X, np.float32(0.5)).astype(np.float32))
    np.testing.assert_array_equal(on_tiles(lambda x: getattr(nl, name)(0.5, x), X), formula(np.float32(0.5), X).astype(np.float32))
    got = on_tiles(lambda x, y: getattr(nl, name)(x, y, dtype=nl.bfloat16), X, Y)
    assert got.dtype == "bfloat16"


UNARY = {
    "exp": np.exp, "tanh": np.tanh, "square": np.square, "abs": np.abs, "sign": np.sign, "negative": np.negative,
    "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "relu": lambda x: np.maximum(x, 0), "copy": lambda x: x,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "silu": lambda x: x / (1 + np.exp(-x)),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_unary_functions(name):
    x = X * 3 if name in ("floor", "ceil", "trunc") else X
    x = np.clip(X, -1.2, 1.2) if name == "tan" else x  # near its poles float32 arithmetic loses digits
    np.testing.assert_allclose(on_tiles(getattr(nl, name), x), UNARY[name](x.astype(np.float64)), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["log", "sqrt", "rsqrt", "reciprocal"])
def test_unary_functions_of_positive_numbers(name):
    formula = {"log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: x**-0.5, "reciprocal": lambda x: 1 / x}[name]
    x = np.abs(X) + 0.1
    np.testing.assert_allclose(on_tiles(getattr(nl, name), x), formula(x.astype(np.float64)), rtol=1e-6, atol=1e-6)


def test_sine_of_large_arguments_is_reduced():
    x = np.linspace(-60, 60, 200, dtype=np.float32)[None]
    np.testing.assert_allclose(on_tiles(nl.sin, x), np.sin(x.astype(np.float64)), atol=1e-5)
    np.testing.assert_allclose(on_tiles(nl.cos, x), np.cos(x.astype(np.float64)), atol=1e-5)


def test_whole_numbers_and_halves():
    x = np.array([[-2.0, -1.5, -0.5, 0.0, 0.5, 1.5, 2.5, 3.0]], np.float32)
    for name in ("floor", "ceil", "trunc"):
        np.testing.assert_array_equal(on_tiles(getattr(nl, name), x), getattr(np, name)(x))


@pytest.mark.parametrize("name", ["sum", "max", "min", "prod", "mean"])
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions(name, keepdims):
    x = X.reshape(16, 4, 6)
    for axis in (2, -1, [1, 2]):
        got = on_tiles(lambda t, a=axis: getattr(nl, name)(t, a, keepdims=keepdims), x)
        want = getattr(np, name)(x.astype(np.float64), axis=tuple(axis) if isinstance(axis, list) else axis, keepdims=keepdims)
        np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-5, atol=1e-5)


def test_var_all_softmax_and_rms_norm():
    x = X.astype(np.float64)
    np.testing.assert_allclose(on_tiles(lambda t: nl.var(t, 1), X), x.var(1, keepdims=True), rtol=1e-5)
    ones = (X > -1).astype(np.float32)
    np.testing.assert_array_equal(on_tiles(lambda t: nl.all(t, 1), ones)[:, 0], ones.all(1))
    powers = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(on_tiles(nl.softmax, X), powers / powers.sum(1, keepdims=True), rtol=1e-5)
    want = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * Y
    np.testing.assert_allclose(on_tiles(lambda t, w: nl.rms_norm(t, w, 1, 24), X, Y), want, rtol=1e-5)


def test_where_and_logical_not():
    condition = (X > 0).astype(np.float32)
    np.testing.assert_array_equal(on_tiles(nl.where, condition, X, Y), np.where(condition, X, Y))
    np.testing.assert_array_equal(on_tiles(lambda c, x: nl.where(c, x, 0.0), condition, X), np.where(condition, X, 0))
    np.testing.assert_array_equal(on_tiles(nl.logical_not, condition), 1 - condition)


def test_bit_functions():
    a, b = values(np.random.default_rng(0), (8, 8), "int32"), values(np.random.default_rng(1), (8, 8), "int32")
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        np.testing.assert_array_equal(on_tiles(getattr(nl, name), a, b), getattr(np, name)(a, b))
    np.testing.assert_array_equal(on_tiles(nl.invert, a), ~a)
    np.testing.assert_array_equal(on_tiles(lambda t: nl.left_shift(t, 3), a), a << 3)


def test_creation():
    def kernel(x):
        tiles = [nl.zeros((4, 4), nl.float32), nl.ones((4, 4), nl.int32), nl.full((4, 4), -2.5, nl.bfloat16)]
        tiles += [nl.zeros_like(loaded(x)), nl.shared_identity_matrix(8, dtype=nl.float32)]
        assert nl.empty_like(tiles[1]).dtype == nl.int32
        hbm = nl.full((300, 3), 7, nl.int32, buffer=nl.shared_hbm)
        return (*[stored(t) for t in tiles], hbm)

    zeros, ones, filled, like, identity, hbm = simulate(kernel, X)
    assert (zeros == 0).all() and (ones == 1).all() and (filled.astype(np.float32) == -2.5).all() and (like == 0).all()
    np.testing.assert_array_equal(identity, np.eye(8))
    assert hbm.shape == (300, 3) and (hbm == 7).all()


def test_movement():
    def kernel(x):
        tile = nl.load(x, dtype=nl.bfloat16)
        wide = nl.broadcast_to(nl.load(x[0:1]), (128, 24))
        columns = nl.broadcast_to(nl.load(x[:, 0:1]), (16, 24))
        out = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
        nl.store(out, tile)
        return out, stored(wide), stored(columns), stored(nl.load_transpose2d(x)), stored(nl.transpose(nl.load(x)))

    out, wide, columns, first, second = simulate(kernel, X)
    np.testing.assert_array_equal(out, X.astype(out.dtype))
    np.testing.assert_array_equal(wide, X[0:1].repeat(128, 0))
    np.testing.assert_array_equal(columns, X[:, 0:1].repeat(24, 1))
    np.testing.assert_array_equal(first, X.T)
    np.testing.assert_array_equal(second, X.T)


def test_matmul_of_the_language():
    got = simulate(lambda x, y: stored(nl.matmul(loaded(x), loaded(y), transpose_x=True)), X, Y)
    np.testing.assert_allclose(got, X.T @ Y, rtol=1e-5, atol=1e-5)


def test_rand_repeats_with_its_seed():
    def kernel(seed):
        outs = []
        for _ in range(2):
            nl.random_seed(loaded(seed))
            outs.append(stored(nl.rand((64, 64), nl.float32)))
        return (*outs, stored(nl.dropout(nl.ones((64, 64), nl.float32), 0.5)))

    a, b, kept = simulate(kernel, np.array([[42]], np.int32))
    np.testing.assert_array_equal(a, b)
    assert a.min() >= 0 and a.max() < 1 and abs(a.mean() - 0.5) < 0.03 and abs(kept.mean() - 0.5) < 0.05


def test_device_print(capsys):
    def kernel(x):
        nl.device_print("tile:", loaded(x))
        return x

    simulate(kernel, np.array([[1.5]], np.float32))
    assert capsys.readouterr().out == "tile: [[1.5]]\n"


@pytest.mark.parametrize(("target", "version", "size"), [("trn2", nisa.nc_version.gen3, 212728), ("trn3", nisa.nc_version.gen4, 245496)])
def test_hardware_constants(target, version, size):
    def kernel(x):
        assert nisa.get_nc_version() == version and nisa.get_nc_version() >= nisa.nc_version.gen3
        assert nl.tile_size.pmax == 128 and nl.tile_size.psum_bank_fmax_bytes == 2048 and nl.tile_size.psum_num_banks == 8
        assert nl.tile_size.sbuf_fmax_bytes == size and nl.tile_size.sbuf_fmax == size // 4
        assert nl.is_hbm(nl.hbm) and nl.is_on_chip(nl.psum) and not nl.is_sbuf(nl.psum)
        return x

    simulate(kernel, X.copy(), target=target)


def test_hardware_constants_at_import_follow_the_environment(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    assert nl.tile_size.sbuf_fmax_bytes == 245496 and nisa.get_nc_version() == nisa.nc_version.gen4
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    assert nl.tile_size.psum_num_banks == 8 and nisa.get_nc_version() == nisa.nc_version.gen3


def test_ranges_and_nested_kernels():
    import nki

    @nki.jit
    def double(x):
        return stored(nl.add(loaded(x), loaded(x)))

    def kernel(x):
        assert [*nl.affine_range(3)] == [*nl.static_range(0, 3)] == [*nl.sequential_range(0, 3, 1)] == [0, 1, 2]
        return double(x)

    np.testing.assert_array_equal(simulate(kernel, X), 2 * X)
