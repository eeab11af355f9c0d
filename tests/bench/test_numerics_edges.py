"""The acceptance rule at its edges: special values, the ends of the range, shapes, dtypes, exact outputs, bits."""

import math

import pytest
import torch

from kdk_bench.numerics import Exact, informative, judge, same_bits, yardstick

# Values that are not finite


def test_special_values_show_the_oracle_or_the_reference():
    d = torch.float16
    o = torch.tensor([1e6, -1e6, math.nan, math.inf, 1.0, 2.0], dtype=torch.float64)
    y = torch.tensor([65504.0, -math.inf, math.nan, math.inf, math.nan, 2.0], dtype=d)
    good = [
        [math.inf, -math.inf, math.nan, math.inf, 1.0, 2.0],
        [65504.0, -math.inf, math.nan, math.inf, math.nan, 2.0],
        [math.inf, -math.inf, math.nan, math.inf, 1.001, 2.0],
    ]
    for k in good:
        assert judge(torch.tensor(k, dtype=d), y, o, longest=1).accepted, k
    bad = {0: 60000.0, 1: math.inf, 2: 0.0, 3: -math.inf, 4: 3.0, 5: math.nan}
    for at, value in bad.items():
        k = torch.tensor(good[0], dtype=d)
        k[at] = value
        verdict = judge(k, y, o, longest=1)
        assert not verdict.accepted, at
        assert f"({at},)" in verdict.reason


def test_a_slice_with_an_unreachable_oracle_is_judged_without_it():
    o = torch.ones(16, dtype=torch.float64)
    o[3] = 1e300
    k = o.half()
    assert judge(k, k, o, longest=1).accepted
    k[5] = 0
    assert not judge(k, o.half(), o, longest=1).accepted


def test_one_rounding_at_the_overflow_threshold_is_no_fault():
    d = torch.float16
    o = torch.full((16,), 50000.0, dtype=torch.float64)
    for value, accepted in ((65510.0, True), (65530.0, True), (60000.0, False), (70000.0, False)):
        o[3] = value
        y, k = o.to(d), o.to(d)
        k[3] = 65504.0 if torch.isinf(y[3]) else math.inf
        assert judge(k, y, o, longest=1).accepted == accepted, value
        k[3] = -math.inf
        assert not judge(k, y, o, longest=1).accepted, value


def test_float16_subnormals_are_values_and_bfloat16_ones_may_be_flushed():
    """A softmax over 32,000 lives below float16's smallest normal number."""
    o = torch.full((8, 32), 3e-5, dtype=torch.float64)
    zeros = torch.zeros(8, 32, dtype=torch.float16)
    assert judge(o.half(), o.half(), o, longest=1).accepted
    assert not judge(zeros, o.half(), o, longest=1).accepted
    o = torch.full((8, 32), 1e-39, dtype=torch.float64)
    assert judge(zeros.bfloat16(), o.bfloat16(), o, longest=1).accepted
    assert not informative(o.bfloat16(), o, longest=1)


@pytest.mark.parametrize("d", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8(d):
    o = torch.randn(64, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    o[0, 0] = 1e6  # NaN in e4m3fn, which has no infinity
    k = o.to(d)
    assert judge(k, k, o, longest=1).accepted
    assert informative(k, o, longest=1)
    wrong = o.clone()
    wrong[7] = 0
    assert not judge(wrong.to(d), k, o, longest=1).accepted


# Shapes, dtypes, exact outputs


def test_shape_and_dtype_are_part_of_the_verdict():
    o = torch.randn(4, 8, dtype=torch.float64)
    y = o.float()
    assert "(8, 4), expected (4, 8)" in judge(y.T, y, o, longest=1).reason
    assert "torch.float16, expected torch.float32" in judge(y.half(), y, o, longest=1).reason


def test_a_bad_oracle_is_the_callers_error():
    y = torch.ones(4)
    with pytest.raises(ValueError, match="must be float64, not"):
        judge(y, y, y, longest=1)
    with pytest.raises(ValueError, match="they must agree"):
        judge(y, y, torch.ones(5, dtype=torch.float64), longest=1)
    with pytest.raises(ValueError, match="longest is 0"):
        judge(y, y, y.double(), longest=0)
    with pytest.raises(ValueError, match="view_as_real"):
        judge(y + 0j, y + 0j, y + 0j, longest=1)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_empty_is_accepted_and_not_informative(shape):
    o = torch.empty(shape, dtype=torch.float64)
    assert judge(o.half(), o.half(), o, longest=1).accepted
    assert not informative(o.half(), o, longest=1)
    assert yardstick(o.half(), o.float(), o, longest=1).shape == shape


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_is_judged_and_not_informative(shape):
    o = torch.full(shape, 3.0, dtype=torch.float64)
    assert judge(o.float(), o.float(), o, longest=1).accepted
    assert not judge(o.float() + 0.1, o.float(), o, longest=1).accepted
    assert not informative(o.float(), o, longest=1)


@pytest.mark.parametrize("d", [torch.int32, torch.int64, torch.uint8, torch.bool])
def test_integers_and_booleans_are_exact(d):
    o = torch.tensor([[0, 1, 1], [1, 0, 0]]).to(d)
    assert judge(o, o, o, longest=1).accepted
    assert informative(o, o, longest=1)
    k = o.clone()
    k[1, 1] = 1
    verdict = judge(k, o, o, longest=1)
    assert not verdict.accepted
    assert "the first at (1, 1)" in verdict.reason
    assert not informative(torch.ones_like(o), torch.ones_like(o), longest=1)


def test_large_integers_are_not_compared_as_floats():
    o = torch.tensor([2**53 + 1])
    assert not judge(o - 1, o, o, longest=1).accepted


def test_exact_floats_compare_values():
    o = torch.tensor([0.0, math.nan, 1.0, math.inf], dtype=torch.float64)
    k = torch.tensor([-0.0, -math.nan, 1.0, math.inf])
    assert judge(k, o.float(), o, longest=1, how=Exact()).accepted
    k[2] = 1 + 2**-23
    assert not judge(k, o.float(), o, longest=1, how=Exact()).accepted


def test_zero_slices():
    o = torch.zeros(4, 16, dtype=torch.float64)
    o[1] = 1
    k = o.float()
    assert judge(k, k, o, longest=1).accepted
    k[0, 3] = 1e-20
    assert not judge(k, o.float(), o, longest=1).accepted


# Bits


BIT_DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64, torch.int64]


@pytest.mark.parametrize("d", BIT_DTYPES)
def test_same_bits_any_dtype_any_strides(d):
    t = torch.arange(12).reshape(3, 4).to(torch.float32).to(d)
    assert same_bits(t, t.T.contiguous().T)
    assert same_bits(t[:, 1], t[:, 1].contiguous())
    assert same_bits(t[0, 0], t[0, 0].clone())
    assert same_bits(t[:1].expand(3, 4), t[:1].repeat(3, 1))
    assert same_bits(t[:0], t[:0].clone())
    other = t.clone()
    other[2, 3] = 0
    assert not same_bits(t, other)
    assert not same_bits(t, t.reshape(4, 3))


def test_same_bits_sees_nan_zero_and_dtype():
    nan = torch.tensor([math.nan])
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, (nan.view(torch.int32) + 1).view(torch.float32))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    conjugate = torch.tensor([1 + 2j]).conj()
    assert same_bits(conjugate, torch.tensor([1 - 2j]))


def test_a_sum_in_order_of_squares_of_16_bit_values_drifts_and_is_right() -> None:
    """The low bits of such squares are biased, so float32 loses a little at every step; one element more or less is far off."""
    x = torch.randn(4, 4099, generator=torch.Generator().manual_seed(0)).bfloat16()
    squares = x.float().square()
    oracle = squares.double().sum(-1)
    total = torch.zeros(4)
    for i in range(4099):
        total += squares[:, i]
    assert ((total - oracle) / oracle).mean() < -20 * torch.finfo(torch.float32).eps
    y = squares.sum(-1)
    assert judge(total, y, oracle, longest=4099).accepted
    assert not judge(squares[:, :-1].sum(-1) * (1 - 1e-4), y, oracle, longest=4099).accepted


def test_what_is_left_of_nearly_equal_numbers_is_no_ones_fault() -> None:
    """A difference that float32 cannot know: the reference was lucky in it, a right kernel need not be."""
    o = torch.full((1, 1), 1.0e-6, dtype=torch.float64)
    y, k = o.float() + 1e-8, o.float() + 1.4e-7
    assert not judge(k, y, o, longest=1).accepted
    spread = torch.full((1, 1), 1.2e-7, dtype=torch.float64)
    assert judge(k, y, o, longest=1, spread=spread).accepted
    assert not judge(torch.zeros(1, 1), y, o, longest=1, spread=spread).accepted
