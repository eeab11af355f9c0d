"""The one rounding, exhaustively for the small formats: exact values stay, midpoints go to the even neighbour."""

import ml_dtypes
import numpy as np
import pytest

from kdk.backends.nki.emulator.dtypes import NUMPY, dtype_name, round_to, widen

FORMATS = ["float16", "bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"]


def every_value(name):
    """All finite values of a format, ascending, with their bit patterns."""
    kind = NUMPY[name]
    bits = np.arange(1 << (8 * kind.itemsize), dtype=np.uint32).astype(f"u{kind.itemsize}")
    values = bits.view(kind).astype(np.float32)
    keep = np.isfinite(values) & ~(np.signbit(values) & (values == 0))
    order = np.argsort(values[keep], kind="stable")
    return values[keep][order], bits[keep][order]


@pytest.mark.parametrize("name", FORMATS)
def test_exact_values_stay(name):
    values, bits = every_value(name)
    np.testing.assert_array_equal(round_to(values, name).view(bits.dtype), bits)
    np.testing.assert_array_equal(widen(bits.view(NUMPY[name])), values)


@pytest.mark.parametrize("name", FORMATS)
def test_midpoints_go_to_even_and_neighbours_to_the_nearer(name):
    values, bits = every_value(name)
    low, high = values[:-1], values[1:]
    middle = (low.astype(np.float64) + high) / 2
    exact = middle.astype(np.float32).astype(np.float64) == middle  # representable: an exact tie
    even_low = (bits[:-1] & 1) == 0
    want = np.where(even_low, low, high)
    got = widen(round_to(middle.astype(np.float32), name))
    np.testing.assert_array_equal(got[exact], want[exact])
    assert exact.mean() > 0.9
    below, above = np.nextafter(middle.astype(np.float32), low), np.nextafter(middle.astype(np.float32), high)
    np.testing.assert_array_equal(widen(round_to(below, name))[exact], low[exact])
    np.testing.assert_array_equal(widen(round_to(above, name))[exact], high[exact])


def test_tfloat32_keeps_ten_bits():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(10000, np.float32)
    got = round_to(x, "tfloat32")
    assert not (got.view(np.uint32) & 0x1FFF).any()
    assert (np.abs(got.astype(np.float64) - x) <= np.abs(x) * 2**-11).all()
    ties = np.array([1 + 2**-11, 1 + 3 * 2**-11], np.float32)
    np.testing.assert_array_equal(round_to(ties, "tfloat32"), [1, 1 + 2**-9])


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "uint8", "uint16", "uint32"])
def test_integers_saturate_and_round_to_even(name):
    limits = np.iinfo(NUMPY[name])
    x = np.array([-np.inf, -1e12, 0.5, 1.5, 2.5, 1e12, np.inf, np.nan], np.float32)
    want = [limits.min, limits.min, 0, 2, 2, limits.max, limits.max, 0]
    np.testing.assert_array_equal(round_to(x, name), want)


def test_names():
    assert dtype_name(np.float32) == dtype_name(np.dtype("float32")) == dtype_name("float32") == "float32"
    assert dtype_name(ml_dtypes.bfloat16) == "bfloat16" and dtype_name(bool) == "bool_"
