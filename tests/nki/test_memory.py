"""Storage: aliasing by address, initialisation and poison, PSUM accumulation, capacity."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from tests.nki.kit import loaded, psum, refused, sbuf, simulate, stored

from kdk.backends.nki import emulator

X = np.arange(128 * 128, dtype=np.float32).reshape(128, 128) / 1000


def hbm(shape, dtype="float32"):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)


# -- initialisation


def test_output_that_is_not_fully_written():
    def kernel(x):
        out = hbm(x.shape)
        nisa.dma_copy(out[:, 0:100], x[:, 0:100])
        return out

    with refused("C15", match=r"3584 of 16384 elements .* the first at \(0, 100\)"):
        simulate(kernel, X)


def test_poison_travels_through_arithmetic_to_an_output():
    def kernel(x):
        out, t = hbm(x.shape), sbuf((128, 128))
        nisa.dma_copy(t[0:96], x[0:96])
        nisa.tensor_scalar(t, t, nl.multiply, 2.0)
        nisa.activation(t, nl.exp, t)
        nisa.dma_copy(out, t)
        return out

    with refused("C16", match=r"4096 of 16384 .*first at \(96, 0\); it became unusable at test_memory.py:\d+"):
        simulate(kernel, X)


def test_partly_filled_tiles_are_fine_while_only_the_valid_part_is_stored():
    def kernel(x):
        out, t, total = hbm((96, 128)), sbuf((128, 128)), sbuf((128, 1))
        nisa.dma_copy(t[0:96], x[0:96])
        nisa.tensor_reduce(total, nl.add, t, axis=1)
        nisa.tensor_scalar(t, t, nl.add, total)
        nisa.dma_copy(out, t[0:96])
        return out

    got = simulate(kernel, X)
    np.testing.assert_allclose(got, X[:96] + X[:96].sum(1, keepdims=True), rtol=1e-5)


def test_poison_of_every_operand_counts():
    """Two tiles with different unwritten parts, and an unwritten scalar per partition."""

    def kernel(x, first, last):
        a, b, v, out = sbuf((128, 128)), sbuf((128, 128)), sbuf((128, 1)), hbm((last - first, 128))
        nisa.dma_copy(a[0:96], x[0:96])
        nisa.dma_copy(b[:, 0:64], x[:, 0:64])
        nisa.dma_copy(b[32:128], x[32:128])
        nisa.dma_copy(v[64:128], x[64:128, 0:1])
        nisa.scalar_tensor_tensor(a, a, nl.add, v, nl.add, b)
        nisa.dma_copy(out, a[first:last])
        return out

    got = simulate(kernel, X, 64, 96)
    np.testing.assert_allclose(got, 2 * X[64:96] + X[64:96, 0:1], rtol=1e-6)
    for first, last in ((0, 32), (32, 64), (96, 128)):
        with refused("C16"):
            simulate(kernel, X, first, last)

    def two(x):
        a, b = sbuf((128, 128)), sbuf((128, 128))
        nisa.dma_copy(a[0:96], x[0:96])
        nisa.dma_copy(b[32:128], x[32:128])
        nisa.tensor_tensor(a, a, b, nl.add)
        return a

    def rows(first, last):
        def kernel(x):
            out = hbm((last - first, 128))
            nisa.dma_copy(out, two(x)[first:last])
            return out

        return kernel

    simulate(rows(32, 96), X)
    for first, last in ((0, 33), (95, 128)):
        with refused("C16"):
            simulate(rows(first, last), X)


def test_poison_of_matmul_is_confined_to_rows_and_columns():
    def kernel(x, columns):
        left, right, out = sbuf((128, 128)), loaded(x), psum((128, 128))
        nisa.dma_copy(left[:, 0:64], x[:, 0:64])
        nisa.nc_matmul(out, left, right)
        copy = sbuf((128, 128))
        nisa.tensor_copy(copy, out)
        result = hbm((columns, 128))
        nisa.dma_copy(result, copy[0:columns])
        return result

    np.testing.assert_allclose(simulate(kernel, X, 64), X[:, :64].T @ X, rtol=1e-4)
    with refused("C16"):
        simulate(kernel, X, 128)


@pytest.mark.parametrize("repeats", [2, 3])
def test_a_repeated_column_is_not_the_whole_tile(repeats):
    """A broadcast view has as many elements as the tile, but covers one column of it."""

    def kernel(x):
        t, wide = sbuf((128, repeats)), sbuf((128, repeats))
        nisa.dma_copy(t[:, 0:1], x[:, 0:1])
        nisa.tensor_copy(wide, t[:, 0:1].broadcast(1, repeats))
        return stored(t)

    with refused("C16"):
        simulate(kernel, X)


def test_overwriting_poison_heals():
    def kernel(x):
        t = sbuf((128, 128))
        nisa.tensor_scalar(t, t, nl.add, 1.0)
        nisa.dma_copy(t, x)
        return stored(t)

    np.testing.assert_array_equal(simulate(kernel, X), X)


def test_poison_in_an_index_or_a_register():
    def indexed(x):
        index, t = sbuf((128, 1), "int32"), sbuf((128, 128))
        nisa.dma_copy(t, x.ap([[128, 128], [1, 128]], vector_offset=index))
        return stored(t)

    def loaded_register(x):
        nisa.register_load(nisa.register_alloc(), sbuf((1, 1), "int32"))
        return x

    for kernel in (indexed, loaded_register):
        with refused("C16"):
            simulate(kernel, X)


def test_activation_outside_its_domain():
    def kernel(x):
        t = loaded(x)
        nisa.activation(t, nl.sin, t)
        return stored(t)

    with refused("C20"):
        simulate(kernel, X)
    np.testing.assert_allclose(simulate(kernel, X / 10), np.sin(X / 10), rtol=1e-6)


def test_zero_is_inside_sqrt_and_nan_shows():
    def kernel(x):
        t = loaded(x)
        nisa.activation(t, nl.sqrt, t)
        return stored(t)

    got = simulate(kernel, np.array([[0.0, 4.0, np.nan]], np.float32))
    np.testing.assert_array_equal(got, [[0, 2, np.nan]])


# -- PSUM


def product(x, *flags, fill=None, target="trn2"):
    def kernel(x):
        t, out = loaded(x), psum((128, 128))
        if fill is not None:
            nisa.memset(out, fill)
        for accumulate in flags:
            nisa.nc_matmul(out, t, t, accumulate=accumulate)
        return stored(out)

    return simulate(kernel, x, target=target)


def test_accumulation_flags():
    once = X.T @ X
    np.testing.assert_allclose(product(X, False), once, rtol=1e-5)
    np.testing.assert_allclose(product(X, None), once, rtol=1e-5)
    np.testing.assert_allclose(product(X, False, True, True), 3 * once, rtol=1e-5)
    np.testing.assert_allclose(product(X, None, None), 2 * once, rtol=1e-5)
    np.testing.assert_allclose(product(X, False, False), once, rtol=1e-5)


def test_accumulation_onto_what_nothing_or_another_instruction_wrote():
    with refused("C9", match="nothing wrote"):
        product(X, True)
    with refused("C9", match="another instruction wrote"):
        product(X, True, fill=0.0)
    with refused("C9", match="another instruction wrote"):
        product(X, None, fill=1.0)
    np.testing.assert_allclose(product(X, None, fill=0.0), X.T @ X, rtol=1e-5)
    np.testing.assert_allclose(product(X, True, fill=1.0, target="trn3"), X.T @ X + 1, rtol=1e-5)


def test_accumulation_state_is_per_element():
    """Overlapping groups, as a convolution writes them."""

    def kernel(x):
        t, out = loaded(x), psum((128, 160))
        nisa.nc_matmul(out[:, 0:128], t, t)
        nisa.nc_matmul(out[:, 32:160], t, t)
        return stored(out)

    once, want = X.T @ X, np.zeros((128, 160), np.float32)
    want[:, 0:128] += once
    want[:, 32:160] += once
    np.testing.assert_allclose(simulate(kernel, X), want, rtol=1e-5)


# -- addresses and capacity


def test_two_tiles_at_one_address_alias_only_one_after_the_other():
    def reused(x):
        a = sbuf((128, 128), address=(0, 0))
        b = sbuf((128, 128), address=(0, 0))
        nisa.dma_copy(a, x)
        keep = sbuf((128, 128))
        nisa.tensor_copy(keep, a)
        nisa.memset(b, 1.0)
        return stored(keep), stored(b)

    def overlapping(x):
        a, b = sbuf((128, 128), address=(0, 0)), sbuf((128, 64), address=(0, 256))
        nisa.dma_copy(a, x)
        nisa.memset(b, 1.0)
        return stored(a), stored(b)

    def stale(x):
        a, b = sbuf((128, 128), address=(0, 0)), sbuf((128, 128), address=(0, 0))
        nisa.dma_copy(a, x)
        return stored(b)

    keep, b = simulate(reused, X)
    np.testing.assert_array_equal(keep, X)
    assert (b == 1).all()
    with refused("C18", match="overlaps"):
        simulate(overlapping, X)
    with refused("C16"):
        simulate(stale, X)


def test_capacity_counts_what_is_live():
    def kernel(x, together):
        tiles = []
        for i in range(8):
            t = sbuf((128, 16384))
            nisa.memset(t, float(i))
            if not together:
                nisa.dma_copy(x, t[:, 0:128])
            tiles.append(t)
        if together:
            for t in tiles:
                nisa.dma_copy(x, t[:, 0:128])

    simulate(kernel, X.copy(), False)
    with refused("C18", match="524288 bytes per partition of sbuf"):
        simulate(kernel, X.copy(), True)


def test_psum_counts_whole_banks():
    def kernel(x, count):
        t = loaded(x)
        tiles = [psum((128, 8)) for _ in range(count)]
        for p in tiles:
            nisa.nc_matmul(p, t, t[:, 0:8])
        for p in tiles:
            nisa.tensor_copy(t[:, 0:8], p)
        return stored(t)

    sim = emulator.simulate(kernel)
    sim(X, 8)
    assert sim.report["psum_peak_banks"] == 8
    with refused("C18", match="psum"):
        simulate(kernel, X, 9)


def test_a_bank_is_kept_where_tensor_engine_transposes_for_the_dma(monkeypatch):
    def kernel(x):
        assert nl.tile_size.psum_num_banks == 7
        tiles = [psum((128, 512)) for _ in range(8)]
        for p in tiles:
            nisa.memset(p, 0.0)
        for p in tiles:
            nisa.tensor_copy(sbuf((128, 512)), p)
        return x

    monkeypatch.setenv("NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE", "true")
    with refused("C18", match="limit 14336"):
        simulate(kernel, X)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_a_tile_larger_than_a_partition(target):
    sizes = {"trn2": 224, "trn3": 256}
    with refused("C18"):
        simulate(lambda x: sbuf((128, sizes[target] * 256)), X, target=target)


def test_psum_address_is_the_start_of_a_bank():
    with refused("C18", match="bank"):
        simulate(lambda x: psum((128, 8), address=(0, 512)), X)
