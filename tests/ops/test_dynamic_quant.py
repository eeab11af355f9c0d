"""What is particular to rms_norm_dynamic_quant and add_rms_norm_dynamic_quant."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kdk
import kdk.ops
from kdk.errors import InputError, RefusedError
from kdk_kernels.rms_norm_dynamic_quant import patterns
from kdk_kernels.rms_norm_dynamic_quant.reference import LARGEST, largest_of

FORMATS = [getattr(torch, name) for name in LARGEST]
PLACES = [("triton", "sm_90"), ("pallas", "v6e"), ("nki", "trn3")]


def rows(*size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator), torch.randn(size[-1], generator=generator)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("language", "target"), PLACES)
def test_formats(language: str, target: str, dtype: torch.dtype) -> None:
    """Every language has every format on its newest chip; q * scale is the norm within half a quantum."""
    x, weight = rows(5, 300)
    with kdk.strict(), kdk.simulate(target), kdk.record() as r:
        q, scale = kdk.ops.rms_norm_dynamic_quant(x, weight, 1e-5, dtype=dtype)
    assert [row.implementation for row in r.rows] == [language] and q.dtype == dtype
    y = kdk.ops.rms_norm(x, weight, 1e-5)
    error = (q.double() * scale.double()[:, None] - y).abs()
    relative = {torch.int8: 0.0, torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}[dtype]
    smallest = {torch.int8: 0.5, torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17}[dtype]
    assert (error <= (y.abs() * relative).maximum(smallest * scale[:, None]) * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("language", "target"), PLACES)
def test_a_row_of_zeros(language: str, target: str, dtype: torch.dtype) -> None:
    x, weight = rows(3, 40)
    x[1] = 0
    with kdk.strict(), kdk.simulate(target):
        q, scale = kdk.ops.rms_norm_dynamic_quant(x, weight, 1e-5, dtype=dtype)
    assert (q[1].float() == 0).all() and 0 < scale[1] < 1e-30
    assert q[0].float().abs().max() == largest_of(dtype) == q[2].float().abs().max()


@pytest.mark.parametrize(("language", "target"), PLACES)
def test_ties_go_to_even(language: str, target: str) -> None:
    """Values that are exactly half a quantum off: x has mean square 1 - eps, so the norm changes nothing but a power of two."""
    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    weight = values / 8
    x = torch.full((1, 8), 8.0)  # its norm is 1 where eps is 0
    with kdk.strict(), kdk.simulate(target):
        q, _ = kdk.ops.rms_norm_dynamic_quant(x, weight, 0.0)
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


@pytest.mark.parametrize(("language", "target"), PLACES)
def test_not_finite(language: str, target: str) -> None:
    x, weight = rows(4, 50)
    x[0, 7], x[2, 9] = math.nan, math.inf
    with kdk.strict(), kdk.simulate(target):
        _, scale = kdk.ops.rms_norm_dynamic_quant(x, weight, 1e-5)
    assert scale.isnan().tolist() == [True, False, True, False]


@pytest.mark.parametrize("H", [16384, 16385, 40000])
def test_long_rows_in_passes(H: int) -> None:
    """Past what a Triton program holds at once."""
    x, weight = rows(2, H)
    residual = x.flip(0).contiguous()
    with kdk.strict(), kdk.simulate("sm_90"):
        q, scale, total = kdk.ops.add_rms_norm_dynamic_quant(x, residual, weight, 1e-5)
    expected, expected_scale = kdk.ops.rms_norm_dynamic_quant(total, weight, 1e-5)
    torch.testing.assert_close(scale, expected_scale)
    assert (q.int() - expected.int()).abs().max() <= 1 and (q != expected).float().mean() < 1e-3
    assert torch.equal(total, x + residual)


@pytest.mark.parametrize(("spelling", "scalars"), patterns.SPELLINGS, ids=lambda s: getattr(s, "__name__", ""))
def test_spellings(spelling: object, scalars: dict[str, torch.dtype]) -> None:
    x, weight = rows(7, 256)
    q, scale = spelling(x, weight, 1e-5)  # type: ignore[operator]
    expected, expected_scale = kdk.ops.rms_norm_dynamic_quant(x, weight, 1e-5, **scalars)
    torch.testing.assert_close(scale, expected_scale)
    assert (q.float() != expected.float()).float().mean() < 1e-3


def test_formats_that_a_chip_lacks_are_refused_by_name() -> None:
    x, weight = rows(2, 16)
    for target, message in (("sm_80", "sm_80 has no float8_e4m3fn"), ("trn2", "trn2 has no float8_e4m3fn")):
        with kdk.strict(), kdk.simulate(target), pytest.raises(RefusedError, match=message):
            kdk.ops.rms_norm_dynamic_quant(x, weight, 1e-5, dtype=torch.float8_e4m3fn)
        with kdk.strict(), kdk.simulate(target):
            kdk.ops.rms_norm_dynamic_quant(x, weight, 1e-5, dtype=torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.float8_e4m3fnuz])
def test_other_formats_are_no_formats(dtype: torch.dtype) -> None:
    x, weight = rows(2, 16)
    with pytest.raises(InputError, match="QUANT-DTYPE"):
        kdk.ops.rms_norm_dynamic_quant(x, weight, 1e-5, dtype=dtype)


def dequantised(x: Tensor) -> Tensor:
    q, scale = kdk.ops.rms_norm_dynamic_quant(x, torch.ones(8), 1e-6)
    return (q.float() * scale[:, None]).sum()


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda x: dequantised(x).backward(),
        lambda x: torch.compile(dequantised, backend="aot_eager")(x).backward(),
        lambda x: torch.func.grad(dequantised)(x.detach()),
    ],
    ids=["eager", "compiled", "torch.func"],
)
def test_a_gradient_is_refused_everywhere(differentiate: Callable[[Tensor], object]) -> None:
    with pytest.raises(Exception, match="rms_norm_dynamic_quant has no backward"):
        differentiate(torch.randn(2, 8, requires_grad=True))


def test_what_needs_no_gradient_is_not_refused() -> None:
    x = torch.randn(2, 8)
    expected = dequantised(x)
    assert torch.equal(torch.compile(dequantised, backend="aot_eager")(x), expected)
    assert torch.equal(torch.func.vmap(dequantised)(x[None]), expected[None])
    gradient, beside = torch.func.grad(lambda a: (a.sum(), dequantised(a)), has_aux=True)(x)
    assert torch.equal(gradient, torch.ones(2, 8)) and torch.equal(beside, expected)
