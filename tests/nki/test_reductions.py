"""Reductions, scans, statistics, accumulators and searches against independent NumPy formulas."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nki.kit import FLOATS, loaded, rounded, run, sbuf, simulate, stored, values

QUICK = settings(max_examples=6, deadline=None)
shapes = st.tuples(st.integers(1, 128), st.integers(1, 40))
floats = st.sampled_from(FLOATS)
seeds = st.integers(0, 1000)
CMD = nisa.reduce_cmd


def f64(x):
    return x.astype(np.float64)


@pytest.mark.parametrize("name", ["add", "multiply", "maximum", "minimum"])
@QUICK
@given(p=st.integers(1, 128), dims=st.tuples(*[st.integers(1, 5)] * 3), last=st.integers(1, 3), seed=seeds, negate=st.booleans())
def test_tensor_reduce(name, p, dims, last, seed, negate):
    x = values(np.random.default_rng(seed), (p, *dims))
    axes = tuple(range(4 - last, 4))
    out = (p, *dims[: 3 - last]) if last < 3 else (p, 1)

    def issue(dst, t):
        nisa.tensor_reduce(dst, getattr(nl, name), t, axis=axes, negate=negate)

    want = getattr(np, name).reduce(f64(x), axis=axes).reshape(out)
    np.testing.assert_allclose(run(issue, x, out=(out, "float32")), -want if negate else want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "formula"),
    [("logical_and", np.all), ("logical_or", np.any), ("logical_xor", lambda x, axis: (x != 0).sum(axis) % 2)],
)
def test_tensor_reduce_logical(name, formula):
    x = (np.random.default_rng(0).random((16, 5)) < 0.7).astype(np.float32)
    got = run(lambda dst, t: nisa.tensor_reduce(dst, getattr(nl, name), t, axis=1), x, out=((16, 1), "float32"))
    np.testing.assert_array_equal(got[:, 0], formula(x, axis=1))


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor"])
def test_tensor_reduce_bits(name):
    x = values(np.random.default_rng(0), (16, 5), "uint16")
    got = run(lambda dst, t: nisa.tensor_reduce(dst, getattr(nl, name), t, axis=1), x, out=((16, 1), "uint16"))
    np.testing.assert_array_equal(got[:, 0], getattr(np, name).reduce(x, axis=1))


@pytest.mark.parametrize("name", ["add", "multiply", "maximum", "minimum"])
@QUICK
@given(shape=shapes, dtype=floats, seed=seeds)
def test_tensor_scalar_reduce_over_several_tiles(name, shape, dtype, seed):
    rng = np.random.default_rng(seed)
    x, y, v = values(rng, shape, dtype), values(rng, shape, dtype), values(rng, (shape[0], 1))

    def issue(first, second, res, a, b, c):
        op = getattr(nl, name)
        nisa.tensor_scalar_reduce(first, a, nl.multiply, c, op)
        nisa.tensor_scalar_reduce(second, b, nl.multiply, c, op, res, reduce_cmd=CMD.reduce, reduce_res_negate=True)

    outs = [(shape, dtype), (shape, dtype), ((shape[0], 1), "float32")]
    first, _, res = run(issue, x, y, v, out=outs)
    np.testing.assert_array_equal(first, rounded(x.astype(np.float32) * v, dtype))
    both = np.concatenate([f64(x) * v, f64(y) * v], 1)
    np.testing.assert_allclose(res[:, 0], -getattr(np, name).reduce(both, axis=1), rtol=1e-3, atol=1e-3)


def test_load_reduce_starts_from_a_given_value():
    x, start = values(np.random.default_rng(0), (8, 5)), values(np.random.default_rng(1), (8, 1))

    def issue(dst, res, a, b):
        nisa.tensor_scalar_reduce(dst, a, nl.add, 0.0, nl.add, res, reduce_cmd=CMD.load_reduce, reduce_init=b)

    _, res = run(issue, x, start, out=[((8, 5), "float32"), ((8, 1), "float32")])
    np.testing.assert_allclose(res, f64(start) + f64(x).sum(1, keepdims=True), rtol=1e-5)


def test_activation_accumulates_over_calls():
    x = values(np.random.default_rng(0), (8, 6))

    def issue(dst, res, a):
        nisa.activation(dst, nl.exp, a, reduce_op=nl.add, reduce_cmd=CMD.reset_reduce)
        nisa.activation(dst, nl.copy, a)  # idle leaves ScalarE's accumulator alone
        nisa.activation(dst, nl.exp, a, reduce_op=nl.add, reduce_cmd=CMD.reduce, reduce_res=res)

    _, res = run(issue, x, out=[((8, 6), "float32"), ((8, 1), "float32")])
    np.testing.assert_allclose(res[:, 0], 2 * np.exp(f64(x)).sum(1), rtol=1e-5)


@QUICK
@given(shape=shapes, seed=seeds, dtype=floats)
def test_scan_is_a_recurrence(shape, seed, dtype):
    rng = np.random.default_rng(seed)
    a, b, start = values(rng, shape, dtype, 0.5), values(rng, shape, dtype), values(rng, (shape[0], 1))
    got = run(lambda d, p, q, s: nisa.tensor_tensor_scan(d, p, q, s, nl.multiply, nl.add), a, b, start, out=(shape, "float32"))
    state = f64(start[:, 0])
    for i in range(shape[1]):
        state = f64(a[:, i]) * state + f64(b[:, i])
        np.testing.assert_allclose(got[:, i], state, rtol=1e-4, atol=1e-4)


def test_scan_with_reversed_operands():
    a, b = values(np.random.default_rng(0), (4, 3)), values(np.random.default_rng(1), (4, 3))

    def issue(dst, p, q):
        nisa.tensor_tensor_scan(dst, p, q, 0.5, nl.subtract, nl.subtract, reverse0=True, reverse1=True)

    got, state = run(issue, a, b, out=((4, 3), "float32")), np.full(4, 0.5, np.float32)
    for i in range(3):  # data1 - (state - data0)
        state = b[:, i] - (state - a[:, i])
        np.testing.assert_array_equal(got[:, i], state)


@pytest.mark.parametrize(("name", "formula"), [("add", np.cumsum), ("maximum", np.maximum.accumulate), ("multiply", np.cumprod)])
def test_tensor_scalar_cumulative(name, formula):
    x = values(np.random.default_rng(0), (8, 12))
    got = run(lambda dst, p: nisa.tensor_scalar_cumulative(dst, p, nl.add, getattr(nl, name), 0.5), x, out=((8, 12), "float32"))
    np.testing.assert_allclose(got, formula(f64(x) + 0.5, axis=1), rtol=1e-4, atol=1e-5)


def test_tensor_scalar_cumulative_goes_on():
    x = values(np.random.default_rng(0), (8, 12))

    def issue(dst, p):
        nisa.tensor_scalar_cumulative(dst[:, 0:5], p[:, 0:5], nl.add, nl.add, 0.0, imm1=2.0, reduce_cmd=CMD.load_reduce)
        nisa.tensor_scalar_cumulative(dst[:, 5:12], p[:, 5:12], nl.add, nl.add, 0.0, reduce_cmd=CMD.reduce)

    np.testing.assert_allclose(run(issue, x, out=((8, 12), "float32")), 2 + np.cumsum(f64(x), 1), rtol=1e-4, atol=1e-5)


@QUICK
@given(p=st.integers(1, 128), sizes=st.lists(st.integers(2, 512), min_size=1, max_size=3), seed=seeds)
def test_bn_stats_and_aggr_give_mean_and_variance(p, sizes, seed):
    x = values(np.random.default_rng(seed), (p, sum(sizes))) + 3

    def issue(dst, tile):
        stats = sbuf((p, 6 * len(sizes)))
        first = 0
        for i, n in enumerate(sizes):
            nisa.bn_stats(stats[:, nl.ds(6 * i, 6)], tile[:, nl.ds(first, n)])
            first += n
        nisa.bn_aggr(dst, stats)

    got = run(issue, x, out=((p, 2), "float32"))
    np.testing.assert_allclose(got[:, 0], f64(x).mean(1), rtol=1e-5)
    np.testing.assert_allclose(got[:, 1], f64(x).var(1), rtol=1e-3, atol=1e-5)


def test_bn_stats_layout():
    x = np.arange(7, dtype=np.float32)[None]
    got = run(lambda dst, t: nisa.bn_stats(dst, t), x, out=((1, 6), "float32"))
    np.testing.assert_allclose(got, [[4, 3, 20, 3, 3, 8]])


def test_range_select():
    rng = np.random.default_rng(0)
    x = values(rng, (16, 20), "bfloat16")
    low, high = rng.integers(0, 5, (16, 1)).astype(np.float32), rng.integers(8, 30, (16, 1)).astype(np.float32)

    def issue(dst, res, t, a, b):
        nisa.range_select(dst, t, nl.greater_equal, nl.less, a, b, reduce_res=res, range_start=3)

    got, res = run(issue, x, low, high, out=[((16, 20), "float32"), ((16, 1), "float32")])
    index = np.arange(3, 23)
    want = np.where((index >= low) & (index < high), x.astype(np.float32), np.float32(-3.4028235e38))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(res[:, 0], want.max(1))


def test_range_select_fills_half_precision_with_infinity():
    x, low, high = np.ones((1, 3), np.float32), np.ones((1, 1), np.float32), np.full((1, 1), 2.0, np.float32)

    def issue(dst, res, t, a, b):
        nisa.range_select(dst, t, nl.greater_equal, nl.less, a, b, reduce_res=res)

    got, res = run(issue, x, low, high, out=[((1, 3), "bfloat16"), ((1, 1), "float32")])
    np.testing.assert_array_equal(got.astype(np.float32), [[-np.inf, 1, -np.inf]])
    assert res[0, 0] == 1


@pytest.mark.parametrize("reverse", [False, True])
def test_select_reduce(reverse):
    rng = np.random.default_rng(0)
    x, p, other = values(rng, (16, 20)), (rng.random((16, 20)) < 0.5).astype(np.uint8), values(rng, (16, 1))

    def issue(dst, res, t, q, o):
        nisa.select_reduce(dst, q, t, o, reduce_res=res, reduce_cmd=CMD.reset_reduce, reverse_pred=reverse)

    got, res = run(issue, x, p, other, out=[((16, 20), "float32"), ((16, 1), "float32")])
    want = np.where((p != 0) ^ reverse, x, other)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(res[:, 0], want.max(1))


def test_exponential():
    x, top = values(np.random.default_rng(0), (16, 20)), np.full((16, 1), 2.0, np.float32)

    def issue(dst, res, t, m):
        nisa.exponential(dst, t, m, reduce_res=res, reduce_cmd=CMD.reset_reduce)

    got, res = run(issue, x, top, out=[((16, 20), "float32"), ((16, 1), "float32")], target="trn3")
    np.testing.assert_allclose(got, np.exp(f64(x) - 2), rtol=1e-5)
    np.testing.assert_allclose(res[:, 0], np.exp(f64(x) - 2).sum(1), rtol=1e-5)


def test_max8_sorts_descending():
    x = values(np.random.default_rng(0), (16, 30))
    got = run(lambda dst, t: nisa.max8(dst, t), x, out=((16, 8), "float32"))
    np.testing.assert_array_equal(got, np.sort(x, 1)[:, ::-1][:, :8])


def test_find_index8_takes_successive_occurrences():
    data = np.array([[5, 1, 5, 2, 3, 5, 4, 0, 9]], np.float32)
    vals = np.array([[5, 5, 9, 7, 5, 5, 0, 1]], np.float32)
    got = run(lambda dst, d, v: nisa.nc_find_index8(dst, d, v), data, vals, out=((1, 8), "uint32"))
    np.testing.assert_array_equal(got, [[0, 2, 8, 0xFFFFFFFF, 5, 0xFFFFFFFF, 7, 1]])


def test_match_replace8_takes_the_last_value_first():
    data = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    vals = np.array([[3, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    outs = [((1, 11), "float32"), ((1, 8), "uint32")]
    got, index = run(lambda dst, i, d, v: nisa.nc_match_replace8(dst, d, v, -1.0, i), data, vals, out=outs)
    np.testing.assert_array_equal(got, [[1, 2, -1, 4, -1, -1, -1, -1, -1, -1, -1]])
    np.testing.assert_array_equal(index, [[2, 10, 9, 8, 7, 6, 5, 4]])


def test_top_16_by_max8_and_match_replace8():
    x = np.random.default_rng(0).permutation(np.arange(64.0, dtype=np.float32))[None].repeat(4, 0)

    def issue(first, second, t):
        rest = sbuf((4, 64))
        nisa.max8(first, t)
        nisa.nc_match_replace8(rest, t, first, -1e9)
        nisa.max8(second, rest)

    first, second = run(issue, x, out=[((4, 8), "float32")] * 2)
    np.testing.assert_array_equal(np.concatenate([first, second], 1)[0], np.arange(63, 47, -1))


def test_stream_shuffle_moves_partitions_inside_a_quadrant():
    x, old = values(np.random.default_rng(0), (64, 5)), values(np.random.default_rng(1), (64, 5))
    mask = [31 - i if i % 2 else 255 for i in range(32)]

    def kernel(x, old):
        dst = loaded(old)
        nisa.nc_stream_shuffle(dst, loaded(x), mask)
        return stored(dst)

    want = old.copy()
    for p in range(64):
        if p % 2:
            want[p] = x[p // 32 * 32 + 31 - p % 32]
    np.testing.assert_array_equal(simulate(kernel, x, old), want)


def test_stream_shuffle_broadcasts_one_partition():
    x = values(np.random.default_rng(0), (1, 5))
    got = run(lambda dst, t: nisa.nc_stream_shuffle(dst, t, [0] * 32), x, out=((32, 5), "float32"))
    np.testing.assert_array_equal(got, x.repeat(32, 0))
