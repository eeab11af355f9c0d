"""DMA: strided copies, casts, gather and scatter, transposes, sums."""

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nki.kit import FLOATS, loaded, psum, refused, rounded, sbuf, simulate, stored, values

QUICK = settings(max_examples=8, deadline=None)
SKIP = nisa.oob_mode.skip


def hbm(shape, dtype="float32"):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)


@QUICK
@given(shape=st.tuples(st.integers(1, 64), st.integers(1, 9), st.integers(1, 9)), a=st.sampled_from(FLOATS),
       b=st.sampled_from([*FLOATS, "int8"]), seed=st.integers(0, 99))  # fmt: skip
def test_copy_casts_and_permutes(shape, a, b, seed):
    x = values(np.random.default_rng(seed), shape, a, scale=50)

    def kernel(x):
        tile, out = sbuf((shape[0], shape[2], shape[1]), b), hbm((shape[0], shape[2], shape[1]), b)
        nisa.dma_copy(tile, x.permute((0, 2, 1)))
        nisa.dma_copy(out, tile)
        return out

    np.testing.assert_array_equal(simulate(kernel, x), rounded(x.astype(np.float32), b).transpose(0, 2, 1))


def test_hbm_to_hbm_and_a_row_to_every_partition():
    x = values(np.random.default_rng(0), (8, 6))

    def kernel(x):
        out, rows = hbm((6, 8)), sbuf((128, 6))
        nisa.dma_copy(out, x.permute((1, 0)))
        nisa.dma_copy(rows, x.ap([[0, 128], [1, 6]], offset=12))
        return out, stored(rows)

    out, rows = simulate(kernel, x)
    np.testing.assert_array_equal(out, x.T)
    np.testing.assert_array_equal(rows, x[2:3].repeat(128, 0))


INDEX = np.array([[5], [0], [7], [5]], np.int32)


@pytest.mark.parametrize("how", ["ap", "vector_select"])
def test_gather(how):
    x = values(np.random.default_rng(0), (8, 6), "bfloat16")

    def kernel(x, index):
        rows, t = loaded(index), sbuf((4, 6), "bfloat16")
        src = x.ap([[6, 4], [1, 6]], vector_offset=rows) if how == "ap" else x.vector_select(0, rows)
        assert src.is_indirect()
        nisa.dma_copy(t, src)
        return stored(t)

    np.testing.assert_array_equal(simulate(kernel, x, INDEX), x[INDEX[:, 0]])


def test_gather_part_of_rows_at_an_offset():
    x = values(np.random.default_rng(0), (8, 6))

    def kernel(x, index):
        t = sbuf((4, 3))
        nisa.dma_copy(t, x.ap([[6, 4], [1, 3]], offset=2, vector_offset=loaded(index)))
        return stored(t)

    np.testing.assert_array_equal(simulate(kernel, x, INDEX), x[INDEX[:, 0], 2:5])


def test_index_out_of_bounds_is_refused_or_skipped():
    x, index = values(np.random.default_rng(0), (8, 6)), np.array([[1], [8], [-1], [3]], np.int32)

    def kernel(x, index, mode):
        t = sbuf((4, 6))
        nisa.memset(t, -2.0)
        nisa.dma_copy(t, x.ap([[6, 4], [1, 6]], vector_offset=loaded(index)), oob_mode=mode)
        return stored(t)

    with refused("C14", match="index 8"):
        simulate(kernel, x, index, nisa.oob_mode.error)
    want = np.full((4, 6), -2, np.float32)
    want[0], want[3] = x[1], x[3]
    np.testing.assert_array_equal(simulate(kernel, x, index, SKIP), want)


def test_scatter():
    x, index = values(np.random.default_rng(0), (4, 6)), np.array([[5], [0], [7], [9]], np.int32)

    def kernel(x, index, out):
        nisa.dma_copy(out.ap([[6, 4], [1, 6]], vector_offset=loaded(index)), loaded(x), oob_mode=SKIP)
        return out

    out = np.zeros((8, 6), np.float32)
    got = simulate(kernel, x, index, out)
    want = np.zeros((8, 6), np.float32)
    want[[5, 0, 7]] = x[:3]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("how", ["tensor", "register", "select"])
def test_scalar_offset(how):
    x = values(np.random.default_rng(0), (5, 4, 6))

    def kernel(x, index):
        tile, t = loaded(index), sbuf((4, 6))
        if how == "select":
            nisa.dma_copy(t, x.select(0, tile))
            return stored(t)
        register = nisa.register_alloc()
        nisa.register_load(register, tile)
        nisa.dma_copy(t, x.ap([[6, 4], [1, 6]], scalar_offset=tile if how == "tensor" else register, indirect_dim=0))
        return stored(t)

    np.testing.assert_array_equal(simulate(kernel, x, np.array([[3]], np.int32)), x[3])
    with refused("C14"):
        simulate(kernel, x, np.array([[5]], np.int32))


def test_scalar_offset_on_chip():
    x = values(np.random.default_rng(0), (16, 5, 6))

    def kernel(x, index):
        tile, t = loaded(x), sbuf((16, 6))
        nisa.tensor_copy(t, tile.select(1, loaded(index)))
        nisa.tensor_scalar(t, tile.ap([[30, 16], [1, 6]], scalar_offset=loaded(index), indirect_dim=1), nl.add, 1.0)
        return stored(t)

    np.testing.assert_array_equal(simulate(kernel, x, np.array([[2]], np.int32)), x[:, 2] + 1)


@pytest.mark.parametrize("shape", [(40, 24), (16, 3, 8), (16, 3, 2, 8)])
def test_dma_transpose(shape):
    order = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(shape)]
    x = values(np.random.default_rng(0), shape)

    def kernel(x):
        t = sbuf(tuple(shape[d] for d in order))
        nisa.dma_transpose(t, x)
        return stored(t)

    np.testing.assert_array_equal(simulate(kernel, x), x.transpose(order))


@pytest.mark.parametrize("shape", [(64, 24), (32, 1, 3, 16)])
def test_gather_transpose(shape):
    rng = np.random.default_rng(0)
    x, index = values(rng, shape, "bfloat16"), rng.permutation(shape[0])[:16].astype(np.uint32)[:, None]
    order = {2: (1, 0), 4: (3, 1, 2, 0)}[len(shape)]
    taken = (16, *shape[1:])

    def kernel(x, index):
        t = sbuf(tuple(taken[d] for d in order), "bfloat16")
        nisa.memset(t, 0.0)
        strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        nisa.dma_transpose(t, x.ap([list(p) for p in zip(strides, taken)], vector_offset=loaded(index)))
        return stored(t)

    np.testing.assert_array_equal(simulate(kernel, x, index), x[index[:, 0]].transpose(order))


def test_gather_transpose_reads_indices_column_by_column():
    rng = np.random.default_rng(0)
    x, index = values(rng, (300, 16), "bfloat16"), rng.integers(0, 300, (128, 2)).astype(np.uint32)

    def kernel(x, index):
        t = sbuf((16, 256), "bfloat16")
        nisa.dma_transpose(t, x.ap([[16, 256], [1, 16]], vector_offset=loaded(index)), axes=(1, 0))
        return stored(t)

    np.testing.assert_array_equal(simulate(kernel, x, index), x[index.T.reshape(-1)].T)


def test_dma_compute_sums_in_float32():
    parts = [values(np.random.default_rng(i), (16, 6), "bfloat16") for i in range(3)]

    def kernel(*parts):
        t = sbuf((16, 6), "bfloat16")
        nisa.dma_compute(t, [loaded(parts[0]), *parts[1:]], nl.add)
        return stored(t)

    want = sum(p.astype(np.float32) for p in parts[1:]) + parts[0].astype(np.float32)
    got = simulate(kernel, *parts)
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-8)


def test_dma_compute_adds_into_rows():
    x, index = values(np.random.default_rng(0), (4, 6)), np.array([[5], [0], [7], [2]], np.int32)

    def scatter(x, index, out):
        rows = out.ap([[6, 4], [1, 6]], vector_offset=loaded(index))
        nisa.dma_compute(rows, [loaded(x), rows], nl.add)
        return out

    def gather(x, index, table):
        t = loaded(x)
        nisa.dma_compute(t, [t, table.ap([[6, 4], [1, 6]], vector_offset=loaded(index))], nl.add)
        return stored(t)

    table = values(np.random.default_rng(1), (8, 6))
    want = table.copy()
    want[index[:, 0]] += x
    np.testing.assert_array_equal(simulate(scatter, x, index, table.copy()), want)
    np.testing.assert_array_equal(simulate(gather, x, index, table), x + table[index[:, 0]])
    with refused("C25", match="unique"):
        simulate(scatter, x, np.zeros((4, 1), np.int32), table.copy())


HW, SW = nisa.dge_mode.hwdge, nisa.dge_mode.swdge
SIXTEEN = np.zeros((16, 16), ml_dtypes.bfloat16)
REFUSED = {
    "psum": ("C3", lambda x: nisa.dma_copy(psum((16, 16), "bfloat16"), x)),
    "count": ("C2", lambda x: nisa.dma_copy(sbuf((16, 15), "bfloat16"), x)),
    "hwdge casts": ("C7", lambda x: nisa.dma_copy(sbuf((16, 16)), x, dge_mode=HW)),
    "hwdge gathers": ("C6", lambda x: nisa.dma_copy(sbuf((16, 16), "bfloat16"), x.vector_select(0, loaded_index()), dge_mode=HW)),
    "engine without hwdge": ("C3", lambda x: nisa.dma_copy(sbuf((16, 16), "bfloat16"), x, engine=nisa.engine.sync)),
    "priority on trn2": ("C12", lambda x: nisa.dma_copy(sbuf((16, 16), "bfloat16"), x, priority=1)),
    "skip without index": ("C25", lambda x: nisa.dma_copy(sbuf((16, 16), "bfloat16"), x, oob_mode=SKIP)),
    "integer mode": ("C24", lambda x: nisa.dma_copy(sbuf((16, 16), "bfloat16"), x, dge_mode=2)),
    "transposed shape": ("C13", lambda x: nisa.dma_transpose(sbuf((8, 32), "bfloat16"), x)),
    "hwdge transpose of 8 rows": ("C13", lambda x: nisa.dma_transpose(sbuf((16, 8), "bfloat16"), x[0:8], dge_mode=HW)),
    "transpose by swdge": ("C13", lambda x: nisa.dma_transpose(sbuf((16, 16), "bfloat16"), x, dge_mode=SW)),
    "transpose casts": ("C7", lambda x: nisa.dma_transpose(sbuf((16, 16)), x)),
    "compute multiplies": ("C19", lambda x: nisa.dma_compute(sbuf((16, 16)), [x, x], nl.multiply)),
    "compute of 17": ("C11", lambda x: nisa.dma_compute(sbuf((16, 16)), [x] * 17, nl.add)),
    "second index": ("C6", lambda x: x.vector_select(0, loaded_index()).select(1, loaded_index()[0:1])),
    "index in float": ("C7", lambda x: x.vector_select(0, loaded(x)[:, 0:1])),
}


def loaded_index():
    t = sbuf((16, 1), "int32")
    nisa.memset(t, 0)
    return t


def rows_by_index(x, rows, columns, dtype="uint32", count=None):
    index = nl.full((rows, columns), 0, dtype)
    count = rows * columns if count is None else count
    return x.ap([[x.shape[1], count], [1, x.shape[1]]], vector_offset=index)


GATHER_TRANSPOSE = {
    "four bytes": ("bfloat16", (16, 8), lambda x: rows_by_index(x.view("float32"), 16, 1), "float32", (4, 16)),
    "wide rows": ("bfloat16", (16, 129), lambda x: rows_by_index(x, 16, 1), "bfloat16", (129, 16)),
    "rows not of 16": ("bfloat16", (16, 8), lambda x: rows_by_index(x, 16, 1, count=8), "bfloat16", (8, 8)),
    "signed index": ("bfloat16", (16, 8), lambda x: rows_by_index(x, 16, 1, "int32"), "bfloat16", (8, 16)),
    "two columns of 64": ("bfloat16", (16, 8), lambda x: rows_by_index(x, 64, 2), "bfloat16", (8, 128)),
}


@pytest.mark.parametrize("name", GATHER_TRANSPOSE)
def test_refused_gather_transposes(name):
    dtype, shape, source, result, target = GATHER_TRANSPOSE[name]
    x = np.zeros(shape, ml_dtypes.bfloat16)

    def kernel(x):
        dst = sbuf((min(target[0], 128), target[1]), result)
        nisa.dma_transpose(dst if target[0] <= 128 else hbm(target, result), source(x))

    assert dtype == str(x.dtype)
    with refused("C13"):
        simulate(kernel, x)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    code, call = REFUSED[name]
    with refused(code):
        simulate(call, SIXTEEN)
