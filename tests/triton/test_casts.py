"""Number formats in the simulator: every cast rounds once, exhaustively for the small formats."""

import ml_dtypes
import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from kdk.backends.triton.simulate import interpret  # noqa: E402

FORMATS = {
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
}
TARGET = {torch.float8_e4m3fnuz: "gfx942", torch.float8_e5m2fnuz: "gfx942"}
BLOCK = 4096


@triton.jit
def cast(x, out, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < N, other=0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < N)


@triton.jit
def cast_toward_zero(x, out, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < N, other=0.0)
    tl.store(out + at, value.to(out.dtype.element_ty, fp_downcast_rounding="rtz"), mask=at < N)


def through_kernel(x: torch.Tensor, dtype: torch.dtype, kernel=cast) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    with interpret(target=TARGET.get(dtype, TARGET.get(x.dtype, "sm_90"))):
        kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK=BLOCK)
    return out


def every_value(dtype: torch.dtype) -> torch.Tensor:
    width = dtype.itemsize * 8
    codes = np.arange(2**width, dtype=np.uint32).astype(f"u{dtype.itemsize}")
    return torch.from_numpy(codes.view(f"i{dtype.itemsize}").copy()).view(dtype)


def float32_sample(dtype: torch.dtype) -> torch.Tensor:
    """Random bit patterns, the midpoints between neighbours of the format with their neighbours, and the extremes."""
    random = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    values = every_value(dtype).float()
    values = values[values.isfinite()].unique()
    ties = (values[1:].double() + values[:-1].double()).div(2).float()
    near = torch.cat([ties, ties.nextafter(torch.tensor(torch.inf)), ties.nextafter(torch.tensor(-torch.inf))])
    largest = values[-1]
    extremes = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-45, -1e-45])
    around = torch.tensor([0.99, 1.0, 1.01, 1.03, 1.07, 1.2, 2.0]) * largest
    return torch.cat([random.view(torch.float32), near, extremes, around, -around])


def nearest(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Round to nearest even by search among all values of the format: shares no code with any cast."""
    codes = every_value(dtype)
    values = codes.double().numpy()
    finite = np.isfinite(values)
    order = np.argsort(values[finite], kind="stable")
    grid = values[finite][order]
    grid, first = np.unique(grid, return_index=True)
    code = codes.view(torch.uint8 if dtype.itemsize == 1 else torch.int16).numpy()[finite][order][first]
    right = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    low, high = grid[right - 1], grid[right]
    up = (x - low > high - x) | ((x - low == high - x) & (code[right - 1] % 2 == 1))
    return np.where(np.isnan(x), np.nan, np.where(up, high, low))


def assert_same_values(got: torch.Tensor, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got.double().numpy(), want.astype(np.float64))


@pytest.mark.parametrize("source", FORMATS, ids=str)
@pytest.mark.parametrize("to", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_value_of_a_small_format_casts_as_in_torch(source, to):
    x = every_value(source)
    torch.testing.assert_close(through_kernel(x, to), x.float().to(to), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_value_survives_the_way_through_float32(dtype):
    x = every_value(dtype)
    back = through_kernel(through_kernel(x, torch.float32), dtype)
    finite = x.float().isfinite()
    raw = torch.uint8 if dtype.itemsize == 1 else torch.int16
    assert torch.equal(x.view(raw)[finite], back.view(raw)[finite])
    assert torch.equal(x.float().isnan(), back.float().isnan())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_float32_rounds_to_nearest_even_and_8_bits_saturate(dtype):
    x = float32_sample(dtype)
    got = through_kernel(x, dtype)
    want = nearest(x.double().numpy(), dtype)
    if dtype == torch.bfloat16:  # overflows to infinity as torch does
        want = x.to(dtype).double().numpy()
    assert_same_values(got, want)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_casts_agree_with_ml_dtypes_inside_the_range(dtype):
    largest = ml_dtypes.finfo(FORMATS[dtype]).max.astype(np.float32)
    x = float32_sample(dtype)
    x = x[x.abs() <= float(largest)]
    assert_same_values(through_kernel(x, dtype), x.numpy().astype(FORMATS[dtype]).astype(np.float64))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("to", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_16_bit_value_to_8_bits(source, to):
    x = every_value(source)
    assert_same_values(through_kernel(x, to), nearest(x.double().numpy(), to))


def test_every_bfloat16_to_float16_and_back():
    x = every_value(torch.bfloat16)
    torch.testing.assert_close(through_kernel(x, torch.float16), x.half(), rtol=0, atol=0, equal_nan=True)
    h = every_value(torch.float16)
    torch.testing.assert_close(through_kernel(h, torch.bfloat16), h.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_float64_rounds_once():
    """A tie of bfloat16 that only float64 can break: by way of float32 it would round down."""
    x = torch.tensor([1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40, 1 + 3 * 2**-8 - 2**-40], dtype=torch.float64)
    assert through_kernel(x, torch.bfloat16).tolist() == [1 + 2**-7, 1.0, 1 + 2**-7]
    ties = torch.tensor([1.0625 + 2**-40, 1.0625 - 2**-40], dtype=torch.float64)
    assert through_kernel(ties, torch.float8_e4m3fn).float().tolist() == [1.125, 1.0]


def test_integers_round_once_and_floats_truncate_to_integers():
    ints = torch.tensor([257, 258, 259, 2**24 + 2**16 + 1, -(2**24) - 2**16 - 1, 0, -1], dtype=torch.int32)
    assert_same_values(through_kernel(ints, torch.bfloat16), nearest(ints.double().numpy(), torch.bfloat16))
    floats = torch.tensor([1.5, -1.5, 127.0, -0.75], dtype=torch.bfloat16)
    assert through_kernel(floats, torch.int32).tolist() == [1, -1, 127, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_toward_zero(dtype):
    x = float32_sample(dtype)
    x = x[x.isfinite()]
    got = through_kernel(x, dtype, cast_toward_zero).double()
    assert bool((got.abs() <= x.double().abs()).all())
    step = every_value(dtype).double()
    step = step[step.isfinite()].unique()
    above = torch.searchsorted(step, got.abs().contiguous(), right=True).clamp(max=len(step) - 1)
    assert bool(((step[above] > x.double().abs()) | (got.abs() == step[-1])).all())
