"""Each formula that models spell out is found in a small module of its own, and what only looks like one is not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kdk.ops  # noqa: F401  (registers the operators)
from kdk_bench.audit import audit, chains, matching, support
from kdk_bench.audit.recorder import Session
from kdk_bench.audit.running import run


class Of(nn.Module):
    """A function as a model, with a parameter so that there is a backward."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.one = function, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.one)


def found(function: Callable[..., Tensor], *shape: int, train: bool = True) -> dict[str, Any]:
    """The report of the function on random numbers."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    capture = run(lambda: (Of(function), (x,), {}), train=train).capture
    assert not capture.error
    return audit.report(capture, support.platforms(["tpu"], {}, {}, []), "test")


K, V, BIAS = torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8), torch.randn(1, 3, 6, 7)
WINDOW = torch.full((6, 6), float("-inf")).triu(1) + torch.full((6, 6), float("-inf")).tril(-3)
WINDOW = WINDOW[None, None]
HEAD, TARGET = torch.randn(32, 16), torch.randint(0, 32, (10,))
AFFINE = torch.randn(16), torch.randn(16)


def softcapped(q: Tensor) -> Tensor:
    scores = torch.tanh(q @ K.transpose(2, 3) * 0.3 / 20.0) * 20.0
    return torch.softmax(scores + BIAS, -1) @ V


def windowed(q: Tensor) -> Tensor:
    return torch.softmax(q @ q.transpose(2, 3) / 8**0.5 + WINDOW, -1) @ q


BIAS_OF_EXPERTS = torch.randn(24) / 8


def group_limited(x: Tensor) -> Tensor:
    """3 of the experts in the 2 best of 6 groups, unsorted, groups by view and mask by expand."""
    scores = x.sigmoid()
    biased = scores + BIAS_OF_EXPERTS
    groups = biased.view(-1, 6, 4).topk(2, dim=-1)[0].sum(dim=-1)
    mask = torch.zeros_like(groups).scatter_(1, torch.topk(groups, k=2, dim=-1, sorted=False)[1], 1)
    mask = mask.unsqueeze(-1).expand(-1, 6, 4).reshape(-1, 24)
    indices = torch.topk(biased.masked_fill(~mask.bool(), float("-inf")), k=3, dim=-1, sorted=False)[1]
    weights = scores.gather(1, indices)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * 1.5


def top_3_of_8(x: Tensor) -> Tensor:
    weights = x.softmax(-1).topk(3, -1)[0]
    return weights / weights.sum(-1, keepdim=True)


def top_3_changed_in_place(x: Tensor) -> Tensor:
    weights = x.softmax(-1).topk(3, -1)[0]
    weights /= weights.sum(-1, keepdim=True)
    return weights * 1.0


def nucleus_from_below(x: Tensor) -> Tensor:
    return x.sort(descending=False)[0].softmax(-1).cumsum(-1)


def quantised(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return (x / scale).round().clamp(-128, 127) * scale


FORMULAS: list[tuple[str, Callable[..., Tensor], tuple[int, ...]]] = [
    ("attention", lambda q: torch.softmax(q @ K.mT * 0.3, -1) @ V, (2, 3, 6, 8)),
    ("attention_with_bias", lambda q: torch.softmax(q @ K.mT / 2.5 + BIAS, -1) @ V, (2, 3, 6, 8)),
    ("attention_with_bias", windowed, (2, 3, 6, 8)),
    ("attention_with_bias_unscaled", lambda q: torch.softmax(q @ K.mT + BIAS, -1) @ V, (2, 3, 6, 8)),
    ("attention_with_softcap", softcapped, (2, 3, 6, 8)),
    ("linear_cross_entropy", lambda x: F.cross_entropy(F.linear(x, HEAD), TARGET), (10, 16)),
    ("router_topk", top_3_of_8, (5, 8)),
    ("router_topk", top_3_changed_in_place, (5, 8)),
    ("router_topk", lambda x: x.topk(3, -1)[0].softmax(-1), (5, 8)),
    ("router_topk", group_limited, (40, 24)),
    ("sample_top_k_top_p", lambda x: x.sort(descending=True)[0].softmax(-1).cumsum(-1), (3, 50)),
    ("sample_top_k_top_p", nucleus_from_below, (3, 50)),
    ("group_norm_silu", lambda x: F.silu(F.group_norm(x, 4, *AFFINE)), (2, 16, 5, 3)),
    ("gelu_and_mul", lambda x: F.gelu(x[..., :8]) * x[..., 8:], (4, 16)),
    ("gelu_tanh_and_mul", lambda x: F.gelu(x[..., :8], approximate="tanh") * x[..., 8:], (4, 16)),
    ("dynamic_quant", quantised, (6, 16)),
]


@pytest.mark.parametrize(("name", "function", "shape"), FORMULAS)
def test_found_and_confirmed(name: str, function: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    report = found(function, *shape)
    assert report["capture"]["chains"] == {name: [""]}
    (finding,) = [f for f in report["findings"] if f["kind"] == "chain" and f["pattern"] == name]
    assert finding["evidence"]["kind"] == "measured"
    operators = ("linear_cross_entropy", "router_topk", "sample_top_k_top_p", "group_norm_silu")
    assert finding["filled_by"]["what"] == ("kdk" if name in operators else "open")


@pytest.mark.parametrize("activation", [F.silu, F.gelu])
def test_a_dropout_is_no_gate(activation: Callable[..., Tensor]) -> None:
    assert found(lambda x: F.dropout(activation(x), 0.3, training=True), 8, 16)["capture"]["chains"] == {}


def test_a_loop_over_time_is_pointed_at_the_scan_only_where_it_is_one() -> None:
    def scan(x: Tensor, step: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(12):
            state = step(x[:, t], state)
            states.append(state)
        return torch.stack(states, 1)

    def loop(step: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
        report = found(lambda x: scan(x, step), 2, 12, 4)
        (finding,) = [f for f in report["findings"] if f["kind"] == "loop"]
        return dict(finding)

    linear = loop(lambda x, state: x.sigmoid() * state + x)
    assert linear["pattern"] == "linear_recurrence" and linear["filled_by"]["name"] == "kdk.ops.linear_recurrence (pallas)"
    assert "h = a * h + b" in linear["evidence"]["source"]
    other = loop(lambda x, state: torch.tanh(x * state + x))
    assert other["pattern"] == "loop" and other["filled_by"]["what"] == "open"


def spelled(chain: chains.Chain, spelling: Callable[..., Any], scalars: Mapping[str, Any], flat: bool) -> Session | None:
    """The recorded run of a spelling on other numbers than its pattern was made with; None where it does not take such tensors."""
    generator, values = torch.Generator().manual_seed(1), []
    letters = {argument: letter for letter, argument in chain.sized.items()}
    for name in inspect.signature(spelling).parameters:
        if name in chain.shapes:
            values.append(chains.example(chain, name, generator, flat))
        elif name in letters:
            values.append(chain.sizes[letters[name]] // (4 if letters[name] in chain.bounded else 1))
        else:
            usual = scalars.get(name, chain.scalars.get(name))
            values.append(0.37 if isinstance(usual, float) else usual)
    session = Session("a spelling")
    try:
        with session.running():
            session.begin([v for v in values if isinstance(v, Tensor)], keep=True)
            spelling(*values)
            session.end()
    except (RuntimeError, IndexError):
        return None
    return session


@pytest.mark.parametrize("grad", [True, False])
def test_every_spelling_of_every_operator_is_found_in_its_own_run(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = chains.patterns(grad)
    monkeypatch.setattr(matching, "patterns", lambda _: patterns)
    found, not_run = 0, set()
    for chain in chains.chains():
        for spelling, scalars in chain.spellings:
            with torch.set_grad_enabled(grad):
                session = spelled(chain, spelling, scalars, flat=False) or spelled(chain, spelling, scalars, flat=True)
            if session is None:
                not_run.add(chain.name)
                continue
            hits = [h.chain.name for h in matching.find(session.capture, grad) if h.confirmed]
            several = sum(not c.view for c in session.capture.graph) > 1
            assert (chain.name in hits) or not several, (chain.name, spelling.__name__, hits)
            found += chain.name in hits
    # Its numbers are tensors: the part that models share is in the catalogue.
    assert not_run == {"sample_top_k_top_p"} and found >= 50
