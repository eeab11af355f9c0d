"""silu_and_mul: what is particular to it. The checks that hold for every operator run elsewhere."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import kdk
import kdk.ops
from kdk.errors import InputError
from kdk_kernels.silu_and_mul import patterns
from kdk_kernels.silu_and_mul.reference import silu_and_mul, silu_and_mul_backward

KERNELS = ("triton", "pallas", "nki")
IMPLEMENTATIONS = ("reference", *KERNELS)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def forward(implementation: str, gate: Tensor, up: Tensor) -> Tensor:
    with kdk.use(implementation), kdk.strict():
        return kdk.ops.silu_and_mul(gate, up)


def gradients(implementation: str, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    return torch.autograd.grad(forward(implementation, gate, up), (gate, up), grad)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=4e-6, atol=1e-6)


@pytest.mark.parametrize("spelling", [s for s, _ in patterns.SPELLINGS], ids=lambda s: s.__name__)
def test_spellings_equal_the_reference(spelling: Any) -> None:
    gate, up = randn(3, 5, 64, dtype=torch.float64) * 4, randn(3, 5, 64, seed=1, dtype=torch.float64)
    torch.testing.assert_close(spelling(gate, up), silu_and_mul(gate, up), rtol=1e-14, atol=0.0)


def test_backward_is_the_derivative() -> None:
    gate = (randn(4, 9, dtype=torch.float64) * 6).requires_grad_()
    up, grad = randn(4, 9, seed=1, dtype=torch.float64).requires_grad_(), randn(4, 9, seed=2, dtype=torch.float64)
    want = torch.autograd.grad(silu_and_mul(gate, up), (gate, up), grad)
    got = silu_and_mul_backward(grad, gate.detach(), up.detach(), "gate,up")
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_gates_saturate(implementation: str) -> None:
    """exp overflows for these gates; nothing of it may show."""
    gate, up = torch.tensor([[-1e4, 1e4, -200.0, 200.0, -0.0, 0.0]]), torch.full((1, 6), 2.0)
    y = forward(implementation, gate, up)
    assert y.tolist() == [[-0.0, 2e4, -0.0, 400.0, -0.0, 0.0]]
    assert [math.copysign(1, v) for v in y[0].tolist()] == [-1, 1, -1, 1, -1, 1]
    d_gate, d_up = gradients(implementation, torch.ones(1, 6), gate, up)
    assert d_gate.tolist() == [[0.0, 2.0, 0.0, 2.0, 1.0, 1.0]]
    assert d_up.tolist() == [[-0.0, 1e4, -0.0, 200.0, -0.0, 0.0]]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_infinities_and_nan_are_the_reference_s(implementation: str) -> None:
    gate = torch.tensor([[math.inf, -math.inf, math.nan, 1.0, 1.0, 0.0]])
    up = torch.tensor([[1.0, 1.0, 1.0, math.inf, math.nan, math.inf]])
    assert torch.isnan(forward(implementation, gate, up)).tolist() == [[False, True, True, False, True, True]]
    assert forward(implementation, gate, up)[0, [0, 3]].tolist() == [math.inf, math.inf]


@pytest.mark.parametrize("implementation", ["triton", "pallas"])  # in NKI the derivative comes from ScalarE's table
def test_float32_gradient_is_accurate_for_large_gates(implementation: str) -> None:
    """Where sigmoid is near 1, 1 - sigmoid has no digits left, and gate multiplies what is lost."""
    gate = torch.linspace(4, 20, 257)[None]
    one = torch.ones_like(gate)
    want, _ = silu_and_mul_backward(one.double(), gate.double(), one.double(), "gate")
    got, _ = gradients(implementation, one, gate, one)
    assert ((got.double() - want) / want).abs().max() < 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("implementation", KERNELS)
def test_halves_of_one_projection(implementation: str) -> None:
    """Row stride 2H (kernels-community#106), for few and for many rows."""
    for rows in (1, 3, 150):
        gate, up = randn(rows, 2 * 48).chunk(2, -1)
        close(forward(implementation, gate, up), silu_and_mul(gate.double(), up.double()))


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("kind", ["sum", "transposed"])
def test_gradients_that_are_views(implementation: str, kind: str) -> None:
    """The gradient of a sum is expanded, that of a transpose is transposed (FlagGems#1068)."""
    grad = torch.ones(()).expand(12, 40) if kind == "sum" else randn(40, 12, seed=2).t()
    gate, up = randn(12, 40), randn(12, 40, seed=1)
    want = silu_and_mul_backward(grad.double(), gate.double(), up.double(), "gate,up")
    for g, w in zip(gradients(implementation, grad, gate, up), want):
        close(g, w)


def test_triton_halves_are_not_copied() -> None:
    pytest.importorskip("triton")
    from kdk_kernels.silu_and_mul.triton import rows_and_columns

    x = randn(2, 3, 64)
    gate, up = rows_and_columns(*x.chunk(2, -1))
    assert gate.shape == up.shape == (6, 32)
    assert (gate.data_ptr(), up.data_ptr()) == (x.data_ptr(), x.data_ptr() + 32 * x.element_size())


def test_nki_halves_are_not_copied() -> None:
    from kdk.backends.nki import launch

    launch.prepare()
    from kdk_kernels.silu_and_mul.nki import lines

    x = randn(2, 3, 64)
    ((gate, gate_stride), (up, up_stride)), (rows, columns, pieces, _) = lines(*x.chunk(2, -1))
    assert (gate.data_ptr(), up.data_ptr()) == (x.data_ptr(), x.data_ptr() + 32 * x.element_size())
    assert gate_stride == up_stride == 64
    assert gate.is_contiguous() and up.is_contiguous()
    assert (rows, columns, pieces) == (96, 2, 16)  # 6 rows in 16 parts each: 96 of 128 partitions have work


def test_triton_index_arithmetic_passes_2_to_31() -> None:
    """Rows times stride (Liger#251, #803): the second row starts at element 2^31."""
    pytest.importorskip("triton")
    memory = torch.empty(2**31 + 64, dtype=torch.float16)  # untouched pages cost nothing
    gate = memory.as_strided((2, 64), (2**31, 1))
    gate.copy_(randn(2, 64))
    up = randn(2, 64, seed=1, dtype=torch.float16)
    want = silu_and_mul(gate.float(), up.float())
    torch.testing.assert_close(forward("triton", gate, up), want.half(), rtol=2e-3, atol=1e-6)
    want_gate, _ = silu_and_mul_backward(gate.float(), gate.float(), up.float(), "gate")
    got_gate, _ = gradients("triton", gate, gate, up)
    torch.testing.assert_close(got_gate, want_gate.half(), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("implementation", KERNELS)
def test_up_is_not_kept_for_its_own_gradient(implementation: str) -> None:
    """Only the gate's gradient reads up: the kernel gets None and writes one tensor."""
    gate, up = randn(5, 33), randn(5, 33, seed=1).requires_grad_()
    with kdk.record() as record, torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t) or t, lambda t: t):
        shapes: list[Tensor] = []
        y = forward(implementation, gate, up)
        (got,) = torch.autograd.grad(y, up, torch.ones_like(y))
    assert len(shapes) == 1 and shapes[0].data_ptr() == gate.data_ptr()
    assert implementation in str(record)
    close(got, torch.nn.functional.silu(gate.double()))


@pytest.mark.parametrize(
    ("gate", "up", "code"),
    [
        (torch.ones(()), torch.ones(()), "SILU-GATE"),
        (torch.ones(4, dtype=torch.int32), torch.ones(4, dtype=torch.int32), "KDK-DTYPE"),
        (torch.ones(2, 4), torch.ones(4), "SILU-UP"),
        (torch.ones(4), torch.ones(4, dtype=torch.bfloat16), "KDK-DTYPE"),
        (torch.ones(4), torch.ones(4, device="meta"), "KDK-DEVICE"),
    ],
)
def test_refused_arguments(gate: Tensor, up: Tensor, code: str) -> None:
    with pytest.raises(InputError, match=code):
        kdk.ops.silu_and_mul(gate, up)
