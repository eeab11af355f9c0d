"""add_rms_norm: what is particular to it. The checks that hold for every operator run elsewhere."""

from typing import Any

import pytest
import torch
from torch import Tensor

import kdk
import kdk.ops
from kdk.errors import InputError
from kdk_bench.check import Row, run_row
from kdk_bench.places import place
from kdk_kernels.add_rms_norm import patterns
from kdk_kernels.add_rms_norm.reference import add_rms_norm, add_rms_norm_backward
from kdk_kernels.rms_norm.reference import rms_norm

KERNELS = ("triton", "pallas", "nki")
EPS = 1e-5


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual and weight."""
    return randn(*shape, dtype=dtype), randn(*shape, seed=1, dtype=dtype), randn(shape[-1], seed=2, dtype=dtype)


def forward(implementation: str, *args: Any) -> tuple[Tensor, Tensor]:
    with kdk.use(implementation), kdk.strict():
        return kdk.ops.add_rms_norm(*args)


@pytest.mark.parametrize(("spelling", "scalars"), patterns.SPELLINGS, ids=lambda s: getattr(s, "__name__", ""))
def test_spellings_equal_the_reference(spelling: Any, scalars: dict[str, float]) -> None:
    x, residual, weight = drawn(3, 5, 64, dtype=torch.float64)
    y, new_residual, _ = add_rms_norm(x, residual, weight, EPS, **scalars)
    for got, want in zip(spelling(x, residual, weight, EPS), (y, new_residual), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=0.0)


def test_backward_is_the_derivative() -> None:
    leaves = [t.requires_grad_() for t in drawn(4, 9, dtype=torch.float64)]
    grads = [randn(4, 9, seed=seed, dtype=torch.float64) for seed in (3, 4)]
    y, new_residual, rstd = add_rms_norm(*leaves, EPS, 1.0)
    for given in (grads, [grads[0], None], [None, grads[1]]):
        pairs = [(o, g) for o, g in zip((y, new_residual), given) if g is not None]
        want = torch.autograd.grad(
            [o for o, _ in pairs], leaves, [g for _, g in pairs], retain_graph=True, allow_unused=True
        )
        have = (new_residual.detach(), leaves[2].detach(), rstd.detach(), 1.0, "x,residual,weight")
        got = add_rms_norm_backward(*given, *have)
        for g, w in zip(got, want, strict=True):
            assert (g is None) == (w is None)
            if g is not None:
                torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("implementation", "dtype"), [*((k, torch.bfloat16) for k in KERNELS), ("triton", torch.float16), ("nki", torch.float16)]
)
def test_the_rounded_sum_is_normalised(implementation: str, dtype: torch.dtype) -> None:
    """y is rms_norm of new_residual as it was returned, and the sum is the correctly rounded one."""
    x, residual, weight = drawn(33, 130, dtype=dtype)
    y, new_residual = forward(implementation, x, residual, weight, EPS)
    assert torch.equal(new_residual, (x.double() + residual.double()).to(dtype))
    of_rounded = rms_norm(new_residual.double(), weight.double(), EPS)[0].to(dtype)
    of_exact = rms_norm(x.double() + residual.double(), weight.double(), EPS)[0].to(dtype)
    assert (y != of_rounded).float().mean() < 0.01  # float32 decides a tie another way now and then
    assert (y != of_exact).float().mean() > 0.1


def test_a_kernel_that_normalises_the_exact_sum_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("kdk_kernels.add_rms_norm.triton")

    def exact(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor, Tensor]:
        total = x.float() + residual.float()
        y, rstd = rms_norm(total, weight, eps, offset)
        return y.to(x.dtype), total.to(x.dtype), rstd

    monkeypatch.setattr(triton, "forward", exact)
    for dtype, outcome in (("float32", set()), ("bfloat16", {"y, all cases pooled"}), ("float16", {"y, all cases pooled"})):
        results = run_row(Row("add_rms_norm", "forward", "triton", "sm_90", dtype), place("triton", "sm_90"))
        assert {r.case for r in results if r.outcome == "failed"} >= outcome, [(r.case, r.reason) for r in results]


@pytest.mark.parametrize("implementation", ["reference", *KERNELS])
@pytest.mark.parametrize("needed", ["x", "residual", "weight", "x,residual", "x,residual,weight"])
def test_outputs_without_a_gradient(implementation: str, needed: str) -> None:
    """Nothing flows back to y, or to new_residual; the gradient is an expanded one, as that of a sum is."""
    x, residual, weight = drawn(5, 33)
    rstd = add_rms_norm(x, residual, weight, EPS)[2]
    grad = randn(33, seed=3).expand(5, 33)
    names = ("x", "residual", "weight")
    for given in ((grad, None), (None, grad)):
        args = (*given, x + residual, weight, rstd, 0.0, needed)
        want = add_rms_norm_backward(*[a.double() if isinstance(a, Tensor) else a for a in args])
        with torch.no_grad():
            got = torch.ops.kdk.add_rms_norm_backward(*args, impl=f"{implementation}!")
        for name, g, w in zip(names, got, want, strict=True):
            if w is None:
                assert g.shape == (0,), f"{name} is not needed, or has no gradient"
            else:
                torch.testing.assert_close(g.double(), w, rtol=4e-6, atol=1e-6)
                assert g.is_contiguous()
        memory = [g.data_ptr() for g in got if g.numel()]
        assert len({*memory, grad.data_ptr()}) == len(memory) + 1


def test_the_weight_has_no_gradient_where_only_the_stream_goes_on() -> None:
    leaves = [t.requires_grad_() for t in drawn(4, 8)]
    for implementation in ("reference", "triton", "pallas", "nki"):
        _, new_residual = forward(implementation, *leaves, EPS)
        grads = torch.autograd.grad(new_residual.sum(), leaves, allow_unused=True)
        assert grads[2] is None
        assert all(torch.equal(g, torch.ones(4, 8)) for g in grads[:2])


def test_new_residual_is_kept_and_not_copied() -> None:
    """Backward reads an output: no more memory is held than the model holds anyway."""
    kept: list[Tensor] = []
    leaves = [t.requires_grad_() for t in drawn(4, 8)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, new_residual = kdk.ops.add_rms_norm(*leaves, EPS)
    pointers = [t.data_ptr() for t in kept]
    assert new_residual.data_ptr() in pointers
    assert leaves[0].data_ptr() not in pointers and leaves[1].data_ptr() not in pointers
    assert [tuple(t.shape) for t in kept] == [(4, 8), (8,), (4,)]


def test_rows_longer_than_a_tile_in_triton() -> None:
    """Two passes, the second of which adds again."""
    from kdk_kernels.rms_norm.triton import WIDEST

    x, residual, weight = drawn(2, WIDEST + 5, dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    outputs = forward("triton", *leaves, EPS)
    want = add_rms_norm(x.detach(), residual.detach(), weight.detach(), EPS)
    assert torch.equal(outputs[1], want[1])
    assert (outputs[0] != want[0]).float().mean() < 0.01
    grads = [randn(*x.shape, seed=seed, dtype=torch.bfloat16) for seed in (3, 4)]
    got = torch.autograd.grad(outputs, leaves, grads)
    expected = add_rms_norm_backward(*grads, want[1], weight.detach(), want[2], 0.0, "x,residual,weight")
    assert torch.equal(got[0], got[1])
    for g, w in zip(got, expected, strict=True):
        torch.testing.assert_close(g, w, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"x": torch.ones(())}, "ADDRMS-X"),
        ({"x": torch.ones(2, 4, dtype=torch.int32)}, "KDK-DTYPE"),
        ({"residual": torch.ones(4)}, "ADDRMS-RESIDUAL"),
        ({"residual": torch.ones(2, 4, dtype=torch.bfloat16)}, "KDK-DTYPE"),
        ({"residual": torch.ones(2, 4, device="meta")}, "KDK-DEVICE"),
        ({"weight": torch.ones(5)}, "ADDRMS-WEIGHT"),
        ({"weight": torch.ones(4, dtype=torch.float64)}, "KDK-DTYPE"),
        ({"eps": -1.0}, "ADDRMS-EPS"),
    ],
)
def test_refused_arguments(change: dict[str, Any], code: str) -> None:
    usual = {"x": torch.ones(2, 4), "residual": torch.ones(2, 4), "weight": torch.ones(4), "eps": EPS}
    with pytest.raises(InputError, match=code):
        kdk.ops.add_rms_norm(**{**usual, **change})
