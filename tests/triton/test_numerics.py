"""Arithmetic, reductions, scans, dot, sort, gather and atomics of the simulator against torch, in every format."""

import contextlib
import io
import math

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.compiler.errors import CompilationError  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402

from kdk.backends.triton.simulate import interpret  # noqa: E402
from kdk.errors import SimulationError  # noqa: E402

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
BLOCK = 1024


def launch(kernel, *args, target="sm_90", grid=(1,), **constants):
    with interpret(target=target):
        kernel[grid](*args, **constants)


def sample(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


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
def dot(a, b, c, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + i[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + j[None, :])
    acc = tl.load(c + i[:, None] * N + j[None, :])
    tl.store(
        out + i[:, None] * N + j[None, :],
        tl.dot(left, right, acc, input_precision=PRECISION, out_dtype=c.dtype.element_ty),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_dot_multiplies_exactly_and_sums_in_float32(dtype):
    a, b, c = sample(16, 32).to(dtype), sample(32, 16, seed=1).to(dtype), sample(16, 16, seed=2)
    out = torch.empty(16, 16)
    launch(dot, a, b, c, out, M=16, N=16, K=32, PRECISION=None)
    want = a.double() @ b.double() + c.double()
    bound = 33 * 2.0**-24 * (a.double().abs() @ b.double().abs() + c.double().abs())
    assert bool(((out.double() - want).abs() <= bound).all())


def test_dot_of_int8():
    a, b = (torch.randint(-128, 128, (32, 32), dtype=torch.int8, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    c = torch.ones(32, 32, dtype=torch.int32)
    out = torch.empty_like(c)
    launch(dot, a, b, c, out, M=32, N=32, K=32, PRECISION=None)
    same(out, (a.long() @ b.long() + 1).int())


def test_dot_of_float32_is_tf32_unless_asked_otherwise():
    a, b, c = sample(16, 16), sample(16, 16, seed=1), torch.zeros(16, 16)
    want = a.double() @ b.double()
    errors = {}
    for precision in ("tf32", "ieee"):
        out = torch.empty(16, 16)
        launch(dot, a, b, c, out, M=16, N=16, K=16, PRECISION=precision)
        errors[precision] = (out.double() - want).abs().max().item()
    default = torch.empty(16, 16)
    launch(dot, a, b, c, default, M=16, N=16, K=16, PRECISION=None)
    assert errors["ieee"] < 1e-5 < 1e-4 < errors["tf32"] < 1e-1
    assert (default.double() - want).abs().max().item() == errors["tf32"]
    amd = torch.empty(16, 16)
    launch(dot, a, b, c, amd, target="gfx950", M=16, N=16, K=16, PRECISION=None)
    assert (amd.double() - want).abs().max().item() == errors["ieee"]


def smallest_k(kind):
    """K from which Triton's compiler for sm_90 takes a dot of this type."""
    constants = {"M": 16, "N": 16, "PRECISION": None}
    signature = {"a": f"*{kind}", "b": f"*{kind}", "c": "*fp32", "out": "*fp32"}
    signature.update(dict.fromkeys(("M", "N", "K", "PRECISION"), "constexpr"))
    for k in (4, 8, 16, 32):
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                triton.compile(ASTSource(dot, signature, {**constants, "K": k}), target=GPUTarget("cuda", 90, 32))
        except CompilationError:
            continue
        return k
    raise AssertionError("no K is accepted")


@pytest.mark.parametrize(
    "dtype, kind",
    [(torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float8_e5m2, "fp8e5"), (torch.float32, "fp32")],
    ids=str,
)
def test_dot_shapes_are_refused_where_the_compiler_refuses_them(dtype, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def run(k, target):
        a, b, c = sample(16, k).to(dtype), sample(k, 16).to(dtype), torch.zeros(16, 16)
        launch(dot, a, b, c, torch.empty(16, 16), target=target, M=16, N=16, K=k, PRECISION=None)

    k = smallest_k(kind)
    with pytest.raises(SimulationError, match=rf"KDK-TRITON-DOT.*K >= {k}"):
        run(k // 2, "sm_90")
    run(k, "sm_90")
    run(k // 2, "gfx950")


def test_8_bit_floats_that_the_target_lacks():
    x = torch.zeros(16).to(torch.float8_e4m3fn)
    with pytest.raises(SimulationError, match="KDK-TRITON-FP8"):
        launch(fp8_add, x, x, torch.empty(16), target="sm_80", BLOCK=16)


@triton.jit
def scaled_dot(a, sa, b, sb, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, PACK: tl.constexpr):
    i, j, k, g = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // PACK), tl.arange(0, K // 32)
    left = tl.load(a + i[:, None] * (K // PACK) + k[None, :])
    right = tl.load(b + k[:, None] * N + j[None, :])
    left_scale = tl.load(sa + i[:, None] * (K // 32) + g[None, :])
    right_scale = tl.load(sb + j[:, None] * (K // 32) + g[None, :])
    tl.store(out + i[:, None] * N + j[None, :], tl.dot_scaled(left, left_scale, KIND, right, right_scale, KIND))


@pytest.mark.skipif(not hasattr(InterpreterBuilder, "create_dot_scaled"), reason="this triton release cannot interpret it")
@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "e2m1"])
def test_scaled_dot(kind):
    generator = torch.Generator().manual_seed(0)
    sa, sb = (torch.randint(120, 134, (32, 2), generator=generator, dtype=torch.uint8) for _ in range(2))
    if kind == "e2m1":
        a, b = (torch.randint(0, 256, (32, 32), generator=generator, dtype=torch.uint8) for _ in range(2))
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        wide_a = torch.stack([table[(a & 15).long()], table[(a >> 4).long()]], 2).view(32, 64)
        wide_b = torch.stack([table[(b & 15).long()], table[(b >> 4).long()]], 1).view(64, 32)
    else:
        dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
        a, b = sample(32, 64).to(dtype), sample(64, 32, seed=1).to(dtype)
        wide_a, wide_b = a.float(), b.float()
    out = torch.empty(32, 32)
    launch(scaled_dot, a, sa, b, sb, out, M=32, N=32, K=64, KIND=kind, PACK=2 if kind == "e2m1" else 1)
    left = wide_a.double() * (sa.double() - 127).exp2().repeat_interleave(32, 1)
    right = wide_b.double() * (sb.double() - 127).exp2().repeat_interleave(32, 1).t()
    torch.testing.assert_close(out.double(), left @ right, rtol=1e-5, atol=1e-4)


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
