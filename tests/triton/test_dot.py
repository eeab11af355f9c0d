"""tl.dot in the simulator: exact products, TF32, the shapes and types that a target takes."""

import contextlib
import io

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from tests.triton.simulated import launch, same, sample  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.compiler.errors import CompilationError  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402

from kdk.errors import SimulationError  # noqa: E402


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


@triton.jit
def fp8_add(x, y, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(tl.float32) + tl.load(y + at).to(tl.float32))


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
