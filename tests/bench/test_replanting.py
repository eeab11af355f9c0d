"""Faults inside an algorithm, which show only when the reference is run with the same fault in one of its own calls."""

import pytest
import torch

from kdk_bench.diagnose import diagnose

ROWS, H, TILE = 96, 320, 128


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(t):
    return t


def gate(i, centre=same, square=same, scale=same, product=same, above=torch.gt, mask=True, left=True):
    """A normalised x, doubled where it is large, times y plus itself. Every parameter is a place for a fault."""
    x, y = i["x"], i["y"]
    x = x - centre(x.mean(-1, keepdim=True))
    n = x * scale(torch.rsqrt(square(x * x).mean(-1, keepdim=True) + 1e-6))
    large = torch.where(above(n, i["limit"]), 2 * n, n) if mask else 2 * n
    return large + product(large * y) if left else product(large * y)


def without_last_tile(t):
    return torch.cat([t[:, : 2 * TILE], torch.zeros_like(t[:, 2 * TILE :])], -1)


def to_bfloat16(t):
    return t.bfloat16().to(t.dtype)


FAULTS = {
    "a sum lost its last tile": ("lost accumulation", {"square": without_last_tile}),
    "means of the row before": ("off by one", {"centre": lambda t: t.roll(1, 0)}),
    "the first row's factor for all": ("stale buffer", {"scale": lambda t: t[:1].expand_as(t)}),
    "a mean in bfloat16": ("missing cast", {"centre": to_bfloat16}),
    "a comparison too weak": ("off by one", {"above": torch.ge}),
    "a mask without effect": ("unmasked tail", {"mask": False}),
    "a term left out": ("wrong formula", {"left": False}),
}


def inputs(equal):
    """equal: half of the normalised values are the limit, to the bit, in float64."""
    x = random(ROWS, H)
    if equal:
        x = x.sign()
        x[:, ::2] = -x[:, 1::2]  # so that its mean is 0
    limit = torch.rsqrt(torch.tensor(1.0 + 1e-6, dtype=torch.float64)) if equal else torch.tensor(0.5, dtype=torch.float64)
    return {"x": x, "y": random(ROWS, H, seed=1), "limit": limit}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_found_and_its_place_is_named(fault):
    cause, change = FAULTS[fault]
    i = inputs(equal="above" in change)
    wide = {name: t.double() for name, t in i.items()}
    o = gate(wide)
    d = diagnose(gate(wide, **change).float(), o.float(), o, longest=H, inputs=i, tiles=(TILE, 32), reference=gate)
    assert d.cause == cause, d.details
    assert "test_replanting.py:" in d.details or cause == "missing cast"  # a simpler guess comes to the same


def test_a_right_reference_and_the_inputs_stay_as_they_are():
    i = inputs(equal=False)
    before = {name: t.clone() for name, t in i.items()}
    o = gate({name: t.double() for name, t in i.items()})
    noise = random(ROWS, H, seed=9)
    d = diagnose(noise, o.float(), o, longest=H, inputs=i, tiles=(TILE, 32), reference=gate)
    assert "the reference if" not in d.details
    assert all(torch.equal(t, before[name]) for name, t in i.items())
    assert torch.equal(gate({name: t.double() for name, t in i.items()}), o)
