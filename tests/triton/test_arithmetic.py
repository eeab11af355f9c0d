"""Arithmetic, atomics and library functions of the simulator against torch, in every format."""

import math

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from tests.triton.simulated import BLOCK, FLOATS, launch, same, sample  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402


@triton.jit
def binary(x, y, out, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    if OP == "add":
        c = a + b
    elif OP == "sub":
        c = a - b
    elif OP == "mul":
        c = a * b
    elif OP == "div":
        c = a / b
    elif OP == "maximum":
        c = tl.maximum(a, b)
    elif OP == "minimum":
        c = tl.minimum(a, b)
    elif OP == "maximum_nan":
        c = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "where":
        c = tl.where(a < b, a, b)
    elif OP == "neg":
        c = -a
    else:
        c = tl.abs(a)
    tl.store(out + at, c.to(out.dtype.element_ty))


BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.fmax,
    "minimum": torch.fmin,
    "maximum_nan": torch.maximum,
    "where": lambda a, b: torch.where(a < b, a, b),
    "neg": lambda a, b: -a,
    "abs": lambda a, b: a.abs(),
}


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_arithmetic_rounds_every_operation(op, dtype):
    x, y = sample(BLOCK, dtype=dtype), sample(BLOCK, dtype=dtype, seed=1)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0]).to(dtype)
    x[:5], y[3:8] = special, special
    x[5], y[5] = torch.nan, torch.nan
    out = torch.empty_like(x)
    launch(binary, x, y, out, OP=op, BLOCK=BLOCK)
    if op == "div":  # Triton divides 16-bit floats in float32
        same(out, (x.float() / y.float()).to(dtype))
    else:
        same(out, BINARY[op](x, y))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_8_bit_values_compute_in_a_wider_format(dtype):
    x, y = sample(BLOCK).to(dtype), sample(BLOCK, seed=1).to(dtype)
    out = torch.empty(BLOCK)
    launch(fp8_add, x, y, out, BLOCK=BLOCK)
    same(out, x.float() + y.float())


@triton.jit
def fp8_add(x, y, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(tl.float32) + tl.load(y + at).to(tl.float32))


@triton.jit
def comparisons(x, y, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    bits = (a < b).to(tl.int32) + 2 * (a <= b).to(tl.int32) + 4 * (a == b).to(tl.int32) + 8 * (a != b).to(tl.int32)
    tl.store(out + at, bits)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_comparisons(dtype):
    x, y = sample(BLOCK, dtype=dtype), sample(BLOCK, dtype=dtype, seed=1)
    x[:4] = y[:4]
    x[4], y[5], x[6], y[6] = torch.nan, torch.nan, 0.0, -0.0
    out = torch.empty(BLOCK, dtype=torch.int32)
    launch(comparisons, x, y, out, BLOCK=BLOCK)
    same(out, (x < y).int() + 2 * (x <= y).int() + 4 * (x == y).int() + 8 * (x != y).int())


@triton.jit
def fused(x, y, z, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.fma(tl.load(x + at), tl.load(y + at), tl.load(z + at)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fma_rounds_once(dtype):
    x, y, z = (sample(BLOCK, dtype=dtype, seed=s) for s in range(3))
    eps = torch.finfo(dtype).eps
    x[0], y[0], z[0] = 1 + eps, 1 + eps, -1  # the last bit of the product survives the cancellation
    x[1], y[1], z[1] = 1 + eps, 1 + eps / 2 if dtype == torch.float32 else 1.5, torch.finfo(dtype).tiny
    out = torch.empty_like(x)
    launch(fused, x, y, z, out, BLOCK=BLOCK)
    if dtype == torch.float32:
        want = (x.double() * y.double() + z.double()).float()
        assert int((out != want).sum()) == 0
    else:
        same(out, (x.double() * y.double() + z.double()).to(dtype))
    assert out[0].double() == ((x[0].double() * y[0].double()) - 1).to(dtype).double()


def test_fma_of_bfloat16_breaks_ties_by_a_tiny_addend():
    """1.5 * 1.00390625... lies midway between two bfloat16; only the addend, lost in float64's rounding, decides."""
    x = torch.full((16,), 1 + 2.0**-7, dtype=torch.bfloat16)
    y = torch.full((16,), 1.5, dtype=torch.bfloat16)  # the product needs 9 bits and is a tie
    z = torch.tensor([2.0**-100, -(2.0**-100)] * 8).bfloat16()
    out = torch.empty_like(x)
    launch(fused, x, y, z, out, BLOCK=16)
    product = 1.5 * (1 + 2.0**-7)
    assert out[:2].double().tolist() == [math.ceil(product * 128) / 128, math.floor(product * 128) / 128]


@triton.jit
def atomics(x, index, out, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v, target = tl.load(x + at), out + tl.load(index + at)
    if OP == "add":
        tl.atomic_add(target, v)
    elif OP == "max":
        tl.atomic_max(target, v)
    else:
        tl.atomic_min(target, v)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
def test_atomic_add_of_colliding_lanes(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-4, 5, (128,), generator=generator).to(dtype)
    index = torch.randint(0, 8, (128,), generator=generator).int()
    out = torch.zeros(8, dtype=dtype)
    launch(atomics, x, index, out, grid=(4,), OP="add", BLOCK=32)
    same(out, torch.zeros(8).index_add(0, index.long(), x.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("op", ["max", "min"])
def test_atomic_extremes(dtype, op):
    x, index = (sample(128) * 100).to(dtype), torch.arange(128).int() % 8
    out = torch.zeros(8, dtype=dtype)
    launch(atomics, x, index, out, grid=(4,), OP=op, BLOCK=32)
    rows = torch.cat([torch.zeros(1, 8, dtype=dtype), x.view(16, 8)])
    same(out, rows.amax(0) if op == "max" else rows.amin(0))


@triton.jit
def old_value(out, seen, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(seen + at, tl.atomic_add(out + at, 1.5))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_atomics_return_the_old_value(dtype):
    out, seen = torch.arange(16).to(dtype), torch.empty(16, dtype=dtype)
    launch(old_value, out, seen, BLOCK=16)
    same(seen, torch.arange(16).to(dtype))
    same(out, (torch.arange(16) + 1.5).to(dtype))


@triton.jit
def integer_ops(x, y, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a // b)
    tl.store(out + BLOCK + at, a % b)
    tl.store(out + 2 * BLOCK + at, a >> 3)
    tl.store(out + 3 * BLOCK + at, tl.umulhi(a, b))


def test_integer_division_truncates_as_in_c():
    x = torch.tensor([7, -7, 7, -7, 2**31 - 1, -(2**31), 0, 5], dtype=torch.int32)
    y = torch.tensor([2, 2, -2, -2, 3, 3, 5, 7], dtype=torch.int32)
    out = torch.empty(4, 8, dtype=torch.int32)
    launch(integer_ops, x, y, out, BLOCK=8)
    same(out[0], torch.div(x.long(), y.long(), rounding_mode="trunc").int())
    same(out[1], torch.fmod(x.long(), y.long()).int())
    same(out[2], x >> 3)
    unsigned = [((a & 0xFFFFFFFF) * (b & 0xFFFFFFFF)) >> 32 for a, b in zip(x.tolist(), y.tolist())]
    assert [v & 0xFFFFFFFF for v in out[3].tolist()] == unsigned


@triton.jit
def one_bit_and_histogram(x, out, counts, BLOCK: tl.constexpr, BINS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at)
    tl.store(out + at, ((v > 2) + (v > 4)).to(tl.int32))
    tl.store(counts + tl.arange(0, BINS), tl.histogram(v, BINS))


def test_one_bit_integers_wrap_and_histograms_drop_what_lies_outside():
    x = torch.arange(16, dtype=torch.int32) % 9
    out, counts = torch.empty(16, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    launch(one_bit_and_histogram, x, out, counts, BLOCK=16, BINS=8)
    same(out, ((x > 2) ^ (x > 4)).int())
    same(counts, torch.bincount(x, minlength=9)[:8].int())


@triton.jit
def library(x, y, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, libdevice.tanh(a))
    tl.store(out + BLOCK + at, libdevice.rsqrt(tl.abs(a)))
    tl.store(out + 2 * BLOCK + at, libdevice.pow(tl.abs(a), b))
    tl.store(out + 3 * BLOCK + at, libdevice.erf(a))
    tl.store(out + 4 * BLOCK + at, libdevice.expm1(a))
    tl.store(out + 5 * BLOCK + at, libdevice.rint(a * 4))
    tl.store(out + 6 * BLOCK + at, libdevice.log1p(tl.abs(a)))
    tl.store(out + 7 * BLOCK + at, libdevice.fast_expf(a) if FAST else libdevice.exp(a))


FAST = tl.constexpr(True)


def test_libdevice():
    x, y = sample(64), sample(64, seed=1)
    out = torch.empty(8, 64)
    launch(library, x, y, out, BLOCK=64)
    a = x.double().abs()
    want = [
        x.double().tanh(),
        a.rsqrt(),
        a ** y.double(),
        x.double().erf(),
        x.double().expm1(),
        (x * 4).round(),
        a.log1p(),
        x.double().exp(),
    ]
    for row, expected in zip(out, want):
        torch.testing.assert_close(row, expected.float(), rtol=1e-6, atol=1e-7)


@triton.jit
def library_of_amd(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, libdevice.tanh(tl.load(x + at)))


def test_libdevice_of_amd_and_a_type_it_does_not_take():
    x, out = sample(64), torch.empty(64)
    launch(library_of_amd, x, out, target="gfx942", BLOCK=64)
    torch.testing.assert_close(out, x.tanh())
    with pytest.raises((ValueError, KeyError)):  # as the compiler: the library has no bfloat16
        launch(library_of_amd, x.bfloat16(), out.bfloat16(), BLOCK=64)
