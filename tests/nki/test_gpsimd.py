"""GpSimdE instructions against independent formulas."""

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nki.kit import loaded, rounded, run, sbuf, simulate, stored, values

QUICK = settings(max_examples=6, deadline=None)
patterns = st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 4)), min_size=1, max_size=4)


def affine(partitions, pattern, offset, multiplier):
    """The loops of the documentation, written out."""
    rows = []
    for p in range(partitions):
        row = []
        for index in np.ndindex(*[n for _, n in pattern]):
            row.append(offset + p * multiplier + sum(i * step for i, (step, _) in zip(index, pattern)))
        rows.append(row)
    return np.array(rows)


@QUICK
@given(p=st.integers(1, 32), pattern=patterns, offset=st.integers(-50, 50), multiplier=st.integers(-3, 3),
       dtype=st.sampled_from(["int32", "float32", "bfloat16", "int8"]))  # fmt: skip
def test_iota(p, pattern, offset, multiplier, dtype):
    want = affine(p, pattern, offset, multiplier)
    got = run(lambda dst: nisa.iota(dst, [list(x) for x in pattern], offset, multiplier), out=(want.shape, dtype))
    np.testing.assert_array_equal(got, rounded(want, dtype))


@pytest.mark.parametrize("name", ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"])
def test_affine_select_is_a_mask(name):
    x = values(np.random.default_rng(0), (32, 32))
    got = run(lambda dst, t: nisa.affine_select(dst, [[-1, 32]], 1, t, -9.0, cmp_op=getattr(nl, name)), x, out=((32, 32), "float32"))
    p, i = np.mgrid[0:32, 0:32]
    np.testing.assert_array_equal(got, np.where(getattr(np, name)(p - i, 0), x, -9))


@pytest.mark.parametrize(("name", "formula"), [("add", np.sum), ("average", np.mean), ("maximum", np.max)])
def test_partition_reduce(name, formula):
    x = values(np.random.default_rng(0), (32, 6))
    got = run(lambda dst, t: nisa.tensor_partition_reduce(dst, getattr(nl, name), t), x, out=((1, 6), "float32"))
    np.testing.assert_allclose(got[0], formula(x.astype(np.float64), axis=0), rtol=1e-5, atol=1e-6)


def test_partition_reduce_of_bits():
    x = values(np.random.default_rng(0), (32, 6), "int32")
    for name in ("bitwise_and", "bitwise_or"):
        got = run(lambda dst, t, name=name: nisa.tensor_partition_reduce(dst, getattr(nl, name), t), x, out=((1, 6), "int32"))
        np.testing.assert_array_equal(got[0], getattr(np, name).reduce(x, axis=0))


def test_n_gather_and_gather_flattened():
    rng = np.random.default_rng(0)
    x, index = values(rng, (16, 3, 7), "bfloat16"), rng.integers(0, 21, (16, 9)).astype(np.uint32)
    want = np.take_along_axis(x.reshape(16, 21), index.astype(np.int64), 1)
    got = run(lambda dst, t, i: nisa.nc_n_gather(dst, t, i), x, index, out=((16, 9), "bfloat16"))
    np.testing.assert_array_equal(got, want)

    def kernel(x, index):
        return stored(nl.gather_flattened(loaded(x), loaded(index)))

    np.testing.assert_array_equal(simulate(kernel, x, index), want)


@pytest.mark.parametrize(("count", "valid"), [(1, None), (4, 20)])
def test_local_gather_per_16_partitions(count, valid):
    rng = np.random.default_rng(0)
    x, index = values(rng, (32, 40)), rng.integers(0, 37, (32, 2)).astype(np.uint16)
    total = 32 if valid is None else valid

    def issue(dst, t, i):
        nisa.local_gather(dst, t, i, num_elem_per_idx=count, num_valid_indices=valid)

    got = run(issue, x, index, out=((32, total * count), "float32"))
    for core in range(2):
        rows = slice(16 * core, 16 * core + 16)
        order = [index[16 * core + k % 16, k // 16] for k in range(total)]
        want = np.concatenate([x[rows, i : i + count] for i in order], 1)
        np.testing.assert_array_equal(got[rows], want)


def test_nonzero_with_count_works_on_every_16th_partition():
    x = (np.random.default_rng(0).random((32, 9)) < 0.5).astype(np.float32)

    def kernel(x):
        dst = sbuf((32, 10), "int32")
        nisa.memset(dst, -7)
        nisa.nonzero_with_count(dst, loaded(x), index_offset=100, padding_val=-1)
        return stored(dst)

    got = simulate(kernel, x)
    for p in range(32):
        if p % 16:
            assert (got[p] == -7).all()
        else:
            found = np.flatnonzero(x[p])
            np.testing.assert_array_equal(got[p], [*(found + 100), *[-1] * (9 - len(found)), len(found)])


def test_topk_of_a_snake():
    rng = np.random.default_rng(0)
    n, k = 42, 8
    snake = rng.permutation(np.arange(n)).astype(np.float32)
    x = np.zeros((16, 3), np.float32)
    for i, v in enumerate(snake):
        x[i % 16, i // 16] = v
    x = np.concatenate([x, -x]).astype(ml_dtypes.bfloat16)
    vals, index = run(lambda v, i, t: nisa.topk(v, i, t, n), x, out=[((32, k), "bfloat16"), ((32, k), "uint32")])
    for p in range(16):
        np.testing.assert_array_equal(vals[p].astype(np.float32), np.arange(n - k, n))
        np.testing.assert_array_equal(snake[index[p]], np.arange(n - k, n))
        np.testing.assert_array_equal(vals[16 + p].astype(np.float32), -np.arange(k - 1, -1, -1.0))


def test_sequence_bounds():
    ids = np.array([[0, 1, 1, 2, 2, 2, 0, 3, 3]], np.int32)
    got = run(lambda dst, t: nisa.sequence_bounds(dst, t), ids, out=((1, 2, 9), "int32"))
    np.testing.assert_array_equal(got[0], [[9, 1, 1, 3, 3, 3, 9, 7, 7], [-1, 3, 3, 6, 6, 6, -1, 9, 9]])
