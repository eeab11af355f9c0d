"""Unwritten data through every kind of instruction: exactly the results that depend on it may not be used."""

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from tests.nki.kit import loaded, psum, sbuf, stored

from kdk.backends.nki import emulator

ROWS, COLUMNS = 32, 24  # the tile has 32 partitions by 24 elements; partition 5 and column 7 are unwritten
BAD_ROW, BAD_COLUMN = 5, 7


def unusable(issue, shape, dtype="float32", target="trn2"):
    """Which elements of the result of `issue(dst, tile)` may not be used, found by storing them one by one."""

    def kernel(x, row, column):
        tile, dst = sbuf((ROWS, COLUMNS)), sbuf(shape, dtype)
        for rows in ((0, BAD_ROW), (BAD_ROW + 1, ROWS)):
            nisa.dma_copy(tile[rows[0] : rows[1], 0:BAD_COLUMN], x[rows[0] : rows[1], 0:BAD_COLUMN])
            nisa.dma_copy(tile[rows[0] : rows[1], BAD_COLUMN + 1 :], x[rows[0] : rows[1], BAD_COLUMN + 1 :])
        issue(dst, tile)
        out = nl.ndarray((1, 1), dtype=dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, dst[row : row + 1, column : column + 1])
        return out

    x = np.random.default_rng(0).random((ROWS, COLUMNS)).astype(np.float32)
    found = np.zeros(shape, bool)
    for row in sorted({0, BAD_ROW, shape[0] - 1} & set(range(shape[0]))):
        for column in range(shape[1]):
            try:
                emulator.simulate(kernel, target=target)(x, row, column)
            except emulator.NkiValidationError as error:
                assert error.code == "C16"
                found[row, column] = True
    return found


def expected(shape, row, columns):
    """Every element of `row`, and `columns` of the other rows, of the rows that `unusable` looks at."""
    want = np.zeros(shape, bool)
    for r in {0, BAD_ROW, shape[0] - 1} & set(range(shape[0])):
        want[r, columns] = True
        if r == row:
            want[r] = True
    return want


def index(pattern, dtype="uint32"):
    tile = sbuf((ROWS, len(pattern)), dtype)
    for i, value in enumerate(pattern):
        nisa.memset(tile[:, i : i + 1], value)
    return tile


def mask():
    return index([1] * COLUMNS, "uint8")


def values_of(tile):
    best = nl.zeros((ROWS, 8), nl.float32)
    nisa.tensor_copy(best[:, 0:4], nl.ones((ROWS, 4), nl.float32))
    return best


WHOLE, ALL, ROW = (ROWS, COLUMNS), slice(None), []
CASES = {
    "copy": (WHOLE, [7], lambda d, t: nisa.tensor_copy(d, t)),
    "activation": (WHOLE, [7], lambda d, t: nisa.activation(d, nl.exp, t)),
    "tensor_scalar with an unwritten vector": (
        WHOLE,
        ALL,
        lambda d, t: nisa.tensor_scalar(d, nl.ones(WHOLE, nl.float32), nl.add, t[:, 7:8]),
    ),
    "reduce": ((ROWS, 1), ALL, lambda d, t: nisa.tensor_reduce(d, nl.add, t, axis=1)),
    "reduce groups": ((ROWS, 6), [1], lambda d, t: nisa.tensor_reduce(d, nl.add, t.reshape((ROWS, 6, 4)), axis=2)),
    "scan": (WHOLE, slice(7, None), lambda d, t: nisa.tensor_tensor_scan(d, t, t, 0.0, nl.multiply, nl.add)),
    "cumulative": (WHOLE, slice(7, None), lambda d, t: nisa.tensor_scalar_cumulative(d, t, nl.add, nl.add, 0.0)),
    "bn_stats": ((ROWS, 6), ALL, lambda d, t: nisa.bn_stats(d, t)),
    "bn_aggr": ((ROWS, 2), ALL, lambda d, t: nisa.bn_aggr(d, t)),
    "max8": ((ROWS, 8), ALL, lambda d, t: nisa.max8(d, t)),
    "match_replace8": (WHOLE, ALL, lambda d, t: nisa.nc_match_replace8(d, t, values_of(t), 0.0)),
    "predicated": (WHOLE, [7], lambda d, t: (nisa.memset(d, 0.0), nisa.tensor_copy_predicated(d, t, mask()))),
    "select_reduce": (WHOLE, [7], lambda d, t: nisa.select_reduce(d, mask(), t, 0.0)),
    "n_gather": ((ROWS, 4), [1, 3], lambda d, t: nisa.nc_n_gather(d, t, index([0, 7, 8, 7]))),
    "indices of find_index8": ((ROWS, 8), ALL, lambda d, t: find(d, t)),
    "dropout": (WHOLE, [7], lambda d, t: nisa.dropout(d, t, 0.0)),
}


def find(dst, tile):
    found = sbuf((ROWS, 8), "uint32")
    nisa.nc_find_index8(found, tile, values_of(tile))
    nisa.tensor_copy(dst, found)


@pytest.mark.parametrize("name", CASES)
def test_results_that_depend_on_unwritten_data(name):
    shape, columns, issue = CASES[name]
    np.testing.assert_array_equal(unusable(issue, shape), expected(shape, BAD_ROW, columns))


def test_transpose_and_shuffle_move_it():
    want = np.zeros((COLUMNS, ROWS), bool)
    want[[0, COLUMNS - 1], BAD_ROW] = True
    want[BAD_ROW, BAD_ROW] = True

    def transpose(dst, tile):
        turned = psum((COLUMNS, ROWS))
        nisa.nc_transpose(turned, tile)
        nisa.tensor_copy(dst, turned)

    np.testing.assert_array_equal(unusable(transpose, (COLUMNS, ROWS)), want)
    # partition 0 of the result is partition 5 of the tile
    got = unusable(lambda d, t: nisa.nc_stream_shuffle(d, t, [BAD_ROW] + list(range(1, 32))), WHOLE)
    assert got[0].all() and got[BAD_ROW].all() and got[31].tolist() == [i == 7 for i in range(COLUMNS)]


def test_gathers_inside_16_partitions():
    """Partition 5 is in the first group; a gather by columns spoils its own partition only."""
    got = unusable(lambda d, t: nisa.local_gather(d, t, index([0], "uint16")), (ROWS, 16))
    assert got[BAD_ROW].all() and not got[0].any() and not got[31].any()
    got = unusable(lambda d, t: nisa.local_gather(d, t, index([7], "uint16")), (ROWS, 16))
    assert got[BAD_ROW].all() and got[0].all() and got[31].all()


def test_topk_of_a_group_with_an_unwritten_partition():
    def issue(dst, tile):
        narrow, places = sbuf(WHOLE, "bfloat16"), sbuf((ROWS, 8), "uint32")
        nisa.tensor_copy(narrow, tile)
        nisa.topk(dst, places, narrow, 16 * 4)

    got = unusable(issue, (ROWS, 8), "bfloat16")
    assert got[0].all() and got[BAD_ROW].all() and not got[31].any()


def test_quantisation_spoils_its_group_of_eight_partitions():
    def kernel(x, first):
        source, data, scale = sbuf((32, 8), "bfloat16"), sbuf((32, 2), "float8_e4m3fn_x4"), sbuf((4, 2), "uint8")
        nisa.dma_copy(source[0:16], x[0:16])
        nisa.dma_copy(source[17:32], x[17:32])
        nisa.quantize_mx(data, source, scale)
        out = nl.ndarray((8, 2), dtype=nl.uint32, buffer=nl.shared_hbm)
        nisa.dma_copy(out, data.view("uint32")[first : first + 8])
        return out

    x = np.ones((32, 8), ml_dtypes.bfloat16)
    for first in (0, 8, 24):
        emulator.simulate(kernel, target="trn3")(x, first)
    with pytest.raises(emulator.NkiValidationError, match="C16"):
        emulator.simulate(kernel, target="trn3")(x, 16)


def test_a_gather_reads_what_its_rows_hold():
    def kernel(rows):
        table, t = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.hbm), sbuf((2, 4))
        nisa.dma_copy(table[0:4], nl.ones((4, 4), nl.float32))
        nisa.dma_copy(t, table.vector_select(0, loaded(rows)))
        return stored(t)

    emulator.simulate(kernel)(np.array([[0], [3]], np.int32))
    with pytest.raises(emulator.NkiValidationError, match="4 of 8 elements"):
        emulator.simulate(kernel)(np.array([[0], [4]], np.int32))
