"""Reductions, scans, sort and gather of the simulator against torch."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from tests.triton.simulated import FLOATS, launch, same, sample  # noqa: E402


@triton.jit
def reductions(x, out, indices, OP: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    v = tl.load(x + row * N + tl.arange(0, N))
    if OP == "sum":
        tl.store(out + row, tl.sum(v))
    elif OP == "max":
        tl.store(out + row, tl.max(v, axis=0))
    elif OP == "min":
        tl.store(out + row, tl.min(v, axis=0))
    else:
        m, i = tl.max(v, axis=0, return_indices=True) if OP == "argmax" else tl.min(v, axis=0, return_indices=True)
        tl.store(out + row, m)
        tl.store(indices + row, i)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
@pytest.mark.parametrize("op", ["max", "min", "argmax", "argmin"])
def test_extremes_and_their_indices(dtype, op):
    x = (sample(8, 64) * 5).round().to(dtype)  # many ties: the leftmost index wins
    out, indices = torch.empty(8, dtype=dtype), torch.empty(8, dtype=torch.int32)
    launch(reductions, x, out, indices, grid=(8,), OP=op, N=64, BLOCK=64)
    want = x.max(1).values if "max" in op else x.min(1).values
    same(out, want)
    if op.startswith("arg"):
        same(indices, torch.stack([(row == v).nonzero()[0, 0] for row, v in zip(x, want)]).int())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_max_skips_nan(dtype):
    """tl.max combines with maxnum, which returns the number; a row of NaN stays NaN."""
    x = sample(3, 16, dtype=dtype)
    x[0, 3], x[1, :] = torch.nan, torch.nan
    out = torch.empty(3, dtype=dtype)
    launch(reductions, x, out, out, grid=(3,), OP="max", N=16, BLOCK=16)
    same(out, torch.stack([x[0][~x[0].isnan()].max(), x[1, 0], x[2].max()]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sum_in_the_type_of_the_elements(dtype):
    ones = torch.ones(2, 256, dtype=dtype)
    out = torch.empty(2, dtype=dtype)
    launch(reductions, ones, out, out, grid=(2,), OP="sum", N=256, BLOCK=256)
    same(out, torch.full((2,), 256.0).to(dtype))
    x = sample(4, 256, dtype=dtype)
    out = torch.empty(4, dtype=dtype)
    launch(reductions, x, out, out, grid=(4,), OP="sum", N=256, BLOCK=256)
    want = x.double().sum(1)
    # A tree of 8 roundings of partial sums whose size is at most sum |x|.
    bound = 8 * torch.finfo(dtype).eps / 2 * x.double().abs().sum(1)
    assert bool(((out.double() - want).abs() <= bound).all())


@triton.jit
def sum_axes(x, rows, columns, everything, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    v = tl.load(x + i[:, None] * N + j[None, :])
    tl.store(rows + i, tl.sum(v, axis=1))
    tl.store(columns + j[None, :], tl.sum(v, axis=0, keep_dims=True))
    tl.store(everything, tl.sum(v))


def test_sum_over_each_axis_and_over_all():
    x = torch.arange(32.0).view(4, 8)
    rows, columns, everything = torch.empty(4), torch.empty(8), torch.empty(1)
    launch(sum_axes, x, rows, columns, everything, M=4, N=8)
    same(rows, x.sum(1))
    same(columns, x.sum(0))
    same(everything, x.sum()[None])


@triton.jit
def _log_add_exp(a, b):
    m = tl.maximum(a, b)
    return m + tl.log(tl.exp(a - m) + tl.exp(b - m))


@triton.jit
def _linear(a1, b1, a2, b2):
    return a1 * a2, a2 * b1 + b2


@triton.jit
def own_reduction(x, out, N: tl.constexpr):
    tl.store(out, tl.reduce(tl.load(x + tl.arange(0, N)), 0, _log_add_exp))


def test_reduce_with_an_own_function():
    x, out = sample(64), torch.empty(1)
    launch(own_reduction, x, out, N=64)
    torch.testing.assert_close(out[0], x.logsumexp(0))


@triton.jit
def scans(a, x, out, OP: tl.constexpr, REVERSE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + at)
    if OP == "cumsum":
        r = tl.cumsum(v, axis=1, reverse=REVERSE)
    elif OP == "cumprod":
        r = tl.cumprod(v, axis=1, reverse=REVERSE)
    else:
        _, r = tl.associative_scan((tl.load(a + at), v), 1, _linear, reverse=REVERSE)
    tl.store(out + at, r)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_cumsum_of_whole_numbers_is_exact(dtype, reverse):
    x = torch.randint(-3, 4, (4, 32), generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.empty_like(x)
    launch(scans, x, x, out, OP="cumsum", REVERSE=reverse, M=4, N=32)
    want = x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1)
    same(out, want.to(dtype))


def test_cumprod_and_a_recurrence():
    x, a = sample(4, 16), sample(4, 16, seed=1)
    out = torch.empty_like(x)
    launch(scans, a, x, out, OP="cumprod", REVERSE=False, M=4, N=16)
    torch.testing.assert_close(out, x.cumprod(1))
    launch(scans, a, x, out, OP="recurrence", REVERSE=False, M=4, N=16)
    h, want = torch.zeros(4), []
    for t in range(16):
        h = a[:, t] * h + x[:, t]
        want.append(h)
    torch.testing.assert_close(out, torch.stack(want, 1))


@triton.jit
def sorting(x, out, DESCENDING: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.sort(tl.load(x + at), descending=DESCENDING))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
@pytest.mark.parametrize("descending", [False, True])
def test_sort(dtype, descending):
    x = (sample(4, 32) * 100).to(dtype)
    out = torch.empty_like(x)
    launch(sorting, x, out, DESCENDING=descending, M=4, N=32)
    same(out, x.sort(1, descending=descending).values)


@triton.jit
def take(x, index, out, flipped, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at)
    tl.store(out + at, tl.gather(v, tl.load(index + at), 0))
    tl.store(flipped + at, tl.flip(v, 0))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gather_and_flip(dtype):
    x, index = sample(64, dtype=dtype), torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(0)).int()
    out, flipped = torch.empty_like(x), torch.empty_like(x)
    launch(take, x, index, out, flipped, BLOCK=64)
    same(out, x[index.long()])
    same(flipped, x.flip(0))
