"""The acceptance rule accepts every right way to compute RMSNorm that we could think of, and refuses the wrong ones."""

import functools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kdk_bench.numerics import Pool, informative, judge, same_bits, sloppy, yardstick

H = 4096
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF = [torch.bfloat16, torch.float16]
EPS = 1e-6


def plain_sum(s):
    return s.sum(-1, keepdim=True)


def tree(s):
    while s.shape[-1] > 1:
        s = s[..., ::2] + s[..., 1::2]
    return s


def in_bfloat16(s):
    total = torch.zeros_like(s[..., :1]).bfloat16()
    for i in range(s.shape[-1]):
        total = total + s[..., i : i + 1].bfloat16()
    return total.float()


def rms_norm(x, w, total=plain_sum, count=None, scale=1.0, compute=None):
    compute = compute or torch.promote_types(x.dtype, torch.float32)
    x32, w32 = x.to(compute), w.to(compute)
    variance = total(x32**2) / (count or x.shape[-1])
    return (x32 * torch.rsqrt(variance + EPS) * w32 * scale).to(x.dtype)


RIGHT = {
    "torch": plain_sum,
    "tree": tree,
    "reversed": lambda s: s.flip(-1).sum(-1, keepdim=True),
    "sequential": lambda s: s.cumsum(-1)[..., -1:],
    "blocks of 64": lambda s: s.reshape(*s.shape[:-1], -1, 64).sum(-1).sum(-1, keepdim=True),
}


@functools.cache
def case(d, seed=0, rows=32, spread=1.0):
    """Inputs, yardstick and oracle; the rows' scales run over a factor `spread`."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, math.log10(spread), rows)[:, None]
    x = (torch.randn(rows, H, generator=generator) * scale).to(d)
    w = torch.randn(H, generator=generator).to(d)
    o = rms_norm(x.double(), w.double())
    y = yardstick(rms_norm(x, w), rms_norm(x.float(), w.float()), o, longest=H)
    return x, w, y, o


def refusal(k, y, o, longest=H):
    """The rule and, for 16-bit outputs, the pool over this one case: the reason of the first refusal."""
    verdict = judge(k, y, o, longest=longest)
    if not verdict.accepted:
        return verdict.reason
    pool = Pool()
    pool.add(k, y, o)
    pooled = pool.verdict()
    return pooled.reason if pooled is not None else ""


@pytest.mark.parametrize("d", DTYPES)
@pytest.mark.parametrize("total", RIGHT.values(), ids=list(RIGHT))
@pytest.mark.parametrize("spread", [1.0, 1e6])
def test_right_variants_are_accepted(d, total, spread):
    for seed in range(3):
        x, w, y, o = case(d, seed, rows=8, spread=1e3 if spread > 1 and d == torch.float16 else spread)
        assert refusal(rms_norm(x, w, total), y, o) == ""


@pytest.mark.parametrize("total", RIGHT.values(), ids=list(RIGHT))
def test_right_variants_are_accepted_in_float64(total):
    x, w, y, o = case(torch.float64, rows=8)
    assert refusal(rms_norm(x, w, total), y, o) == ""


def zero_row(x, w):
    k = rms_norm(x, w)
    k[5] = 0
    return k


def zero_tile(x, w):
    k = rms_norm(x, w)
    k[:16, 128:256] = 0
    return k


def nan_element(x, w):
    k = rms_norm(x, w)
    k[3, 7] = math.nan
    return k


WRONG = {
    "last dropped": lambda x, w: rms_norm(x, w, lambda s: s[..., :-1].sum(-1, keepdim=True)),
    "N-1": lambda x, w: rms_norm(x, w, count=H - 1),
    "scale 1.03": lambda x, w: rms_norm(x, w, scale=1.03),
    "one zero row": zero_row,
    "one zero tile": zero_tile,
    "sum in bfloat16": lambda x, w: rms_norm(x, w, in_bfloat16),
    "NaN where finite": nan_element,
    "zeros": lambda x, w: torch.zeros_like(x),
    "mean": lambda x, w: torch.full_like(x, float(rms_norm(x, w).float().mean())),
    "input returned": lambda x, w: x,
    "weight missing": lambda x, w: rms_norm(x, torch.ones_like(w)),
}


@pytest.mark.parametrize("d", DTYPES)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
def test_wrong_variants_are_refused(d, wrong):
    x, w, y, o = case(d)
    assert refusal(wrong(x, w), y, o) != ""


@pytest.mark.parametrize("count, refused", [(H, False), (H - 1, True)])
def test_float64_catches_a_wrong_divisor(count, refused):
    x, w, y, o = case(torch.float64, rows=8)
    assert bool(refusal(rms_norm(x, w, count=count), y, o)) == refused


def test_float64_refuses_a_kernel_that_computes_in_float32():
    x, w, y, o = case(torch.float64, rows=8)
    assert refusal(rms_norm(x, w, compute=torch.float32), y, o)


@pytest.mark.parametrize("row", [0, 31])
def test_each_row_is_judged_at_its_own_scale(row):
    """Rows from 1 to 1e6: half of the smallest row missing is nothing beside the largest."""
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)) * torch.logspace(0, 6, 32)[:, None]
    k = x.clone()
    k[row, ::2] = 0
    assert judge(x, x, x.double(), longest=1).accepted
    assert not judge(k, x, x.double(), longest=1).accepted


def test_short_last_axis_joins_the_axis_before():
    """(32, 16, 4): four elements are too few to be a slice, but a row of 64 must not hide behind a larger row."""
    x = torch.randn(32, 16, 4, generator=torch.Generator().manual_seed(1)) * torch.logspace(0, 6, 32)[:, None, None]
    k = x.clone()
    k[0] = 0
    assert judge(x, x, x.double(), longest=1).accepted
    assert not judge(k, x, x.double(), longest=1).accepted


@pytest.mark.parametrize("d", HALF)
def test_truncation_shows_in_the_pool(d):
    o = torch.randn(64, 1024, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = o.to(d)
    toward_zero = torch.where(y.double().abs() > o.abs(), (y.view(torch.int16) - 1).view(d), y)
    pool = Pool()
    pool.add(toward_zero, y, o)
    verdict = pool.verdict()
    assert verdict is not None
    assert not verdict.accepted
    assert "pooled" in verdict.reason


def test_pool_needs_enough_elements_and_keeps_dtypes_apart():
    pool = Pool()
    o = torch.randn(16, 255, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pool.add(o.bfloat16(), o.bfloat16(), o)
    pool.add(o.float(), o.float(), o)
    assert pool.verdict() is None
    pool.add(o.half(), o.half(), o)
    assert pool.verdict() is None
    pool.add(o.bfloat16(), o.bfloat16(), o)
    verdict = pool.verdict()
    assert verdict is not None
    assert verdict.accepted
    pool.add(o.half() * 1.0005, o.half(), o)
    biased = (o * 1.0005).half()
    pool.add(biased, o.half(), o)
    verdict = pool.verdict()
    assert verdict is not None
    assert not verdict.accepted


def test_pool_refuses_what_the_rule_already_refused():
    o = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ValueError, match="pool only outputs that judge"):
        Pool().add(torch.zeros(3).half(), o.half(), o)


# Yardstick, sloppy references, information


def test_yardstick_is_the_better_of_the_two():
    x, w, y, o = case(torch.bfloat16, rows=8)
    good = rms_norm(x.float(), w.float())
    rough = rms_norm(x, w, in_bfloat16)
    assert same_bits(yardstick(rough, good, o, longest=H), good.bfloat16())
    assert same_bits(yardstick(y, torch.zeros_like(good), o, longest=H), y)
    assert sloppy(y, y, o, longest=H) is None
    assert "fails its own check" in (sloppy(rough, y, o, longest=H) or "")


def test_yardstick_prefers_finite():
    o = torch.full((16,), 3.0, dtype=torch.float64)
    overflowed = o.half()
    overflowed[2] = math.inf
    assert same_bits(yardstick(overflowed, o.float() * 1.01, o, longest=1), (o.float() * 1.01).half())


def test_yardstick_in_float64_and_for_integers_is_the_reference():
    o = torch.tensor([1.0, 1 / 3], dtype=torch.float64)
    assert yardstick(o, o.float(), o, longest=1) is not None
    assert same_bits(yardstick(o, o.float(), o, longest=1), o)
    i = torch.tensor([1, 2])
    assert same_bits(yardstick(i, i.float(), i, longest=1), i)


def test_mean_of_a_constant_is_not_informative():
    o = torch.full((4, 16), 2.5, dtype=torch.float64)
    assert not informative(o.float(), o, longest=1)
    o[1] = -2.5
    assert informative(o.float(), o, longest=1)


# Properties

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 6e-8, 6.1e-5, 65504.0, 65520.0, 1e38, 3.5e38, 1e-310, 1e308]
values = st.one_of(st.sampled_from(SPECIAL), st.floats(allow_nan=True, allow_infinity=True))
SHAPES = [(), (1,), (7,), (3, 5), (2, 9), (2, 3, 4)]
ALL = [*DTYPES, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


@st.composite
def oracle_and_reference(draw):
    shape = draw(st.sampled_from(SHAPES))
    size = math.prod(shape)
    o, y = (torch.tensor(draw(st.lists(values, min_size=size, max_size=size)), dtype=torch.float64) for _ in "oy")
    return o.reshape(shape), y.reshape(shape)


@settings(max_examples=150, deadline=None)
@given(oracle_and_reference(), st.sampled_from(ALL), st.integers(1, 10**6))
def test_the_rounded_oracle_is_always_accepted(tensors, d, longest):
    o, y = tensors
    verdict = judge(o.to(d), y.to(d), o, longest=longest)
    assert verdict.accepted, verdict.reason


@settings(max_examples=60, deadline=None)
@given(oracle_and_reference(), st.sampled_from(ALL))
def test_the_reference_is_never_sloppy_by_its_own_measure(tensors, d):
    o, y = tensors
    verdict = judge(y.to(d), y.to(d), o, longest=1)
    assert verdict.accepted, verdict.reason


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(DTYPES), st.integers(-8, 8), st.sampled_from([0, 1, 3e-3, 1e-2, 1e-7]))
def test_scaling_by_a_power_of_two_and_permuting_rows_change_nothing(seed, d, power, noise):
    power = abs(power) if d == torch.float16 else power  # smaller ones would leave its normal range, where the spacing is absolute
    generator = torch.Generator().manual_seed(seed)
    o = torch.randn(6, 33, dtype=torch.float64, generator=generator)
    y = o.to(d)
    k = (o * (1 + noise * torch.randn(6, 33, dtype=torch.float64, generator=generator))).to(d)
    usual = judge(k, y, o, longest=33)
    scaled = judge(k * 2.0**power, y * 2.0**power, o * 2.0**power, longest=33)
    order = torch.randperm(6, generator=generator)
    permuted = judge(k[order], y[order], o[order], longest=33)
    assert permuted.accepted == usual.accepted
    assert permuted.error_ratio == pytest.approx(usual.error_ratio)
    # float16's smallest elements may lie below its normal range
    assert scaled.error_ratio == pytest.approx(usual.error_ratio, rel=2e-2 if d == torch.float16 else 1e-6)
    if abs(usual.error_ratio - 1) > 2e-2:
        assert scaled.accepted == usual.accepted
