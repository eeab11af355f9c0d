"""Activation checkpointing, both kinds: the recomputation takes the choice of the forward."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import kdk
from kdk import checkpointing, selection
from kdk.errors import FallbackWarning
from kdk.selection import bind, current

pytestmark = pytest.mark.filterwarnings("ignore::kdk.FallbackWarning")


def block(x: torch.Tensor) -> torch.Tensor:
    return kdk.ops.cube(x).sin()


@pytest.fixture(params=[True, False], ids=["reentrant", "not reentrant"])
def checkpointed(request: pytest.FixtureRequest) -> Any:
    return functools.partial(checkpoint, block, use_reentrant=request.param)


def forwards(r: kdk.record) -> list[tuple[str, str, int]]:
    return [(row.implementation, row.how, row.calls) for row in r.rows if row.direction == "forward"]


def test_chosen_for_the_forward(checkpointed: Any) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with kdk.record() as r:
        with kdk.use("reference"):
            y = checkpointed(x)
        y.sum().backward()
    assert forwards(r) == [("reference", "inlined", 2)]
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test_chosen_for_the_backward_alone(checkpointed: Any) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with kdk.record() as r:
        y = checkpointed(x)
        with kdk.use("reference"):
            y.sum().backward()
    assert forwards(r) == [("torch", "device", 2)]


def test_the_default_changes_before_the_backward(checkpointed: Any) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with kdk.record() as r:
        y = checkpointed(x)
        kdk.set_default("reference")
        y.sum().backward()
    assert forwards(r) == [("torch", "device", 2)]


def test_a_module(checkpointed: Any) -> None:
    class Block(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return kdk.ops.cube(super().forward(x))

    module = Block(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    with kdk.use("reference"):
        y = checkpoint(module, x, use_reentrant=checkpointed.keywords["use_reentrant"])
    with kdk.record() as r:
        y.sum().backward()
    assert forwards(r) == [("reference", "inlined", 1)]
    assert module.weight.grad is not None


def test_wrapped_once() -> None:
    before = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    checkpointing.keep_the_choice()
    assert torch.utils.checkpoint._checkpoint_without_reentrant_generator is before


@pytest.mark.parametrize("default", [{}, {"*": "torch"}, {"cube": "torch"}, {"cube": "torch", "!": "!"}])
@pytest.mark.parametrize("choice", [{}, {"*": "reference"}, {"cube": "nki"}, {"!": "!"}, {"*": "pallas", "cube": "nki"}])
@pytest.mark.parametrize("later", [{}, {"*": "triton", "cube": "triton", "!": "!"}])
def test_bind_means_now(monkeypatch: Any, default: Any, choice: Any, later: Any) -> None:
    def both() -> tuple[str, str]:
        return current("cube"), current("rope")

    monkeypatch.setattr(selection.LOCAL, "choice", copy.copy(choice))
    monkeypatch.setattr(selection, "DEFAULT", copy.copy(default))
    now, bound = both(), bind(both)
    monkeypatch.setattr(selection.LOCAL, "choice", copy.copy(later))
    monkeypatch.setattr(selection, "DEFAULT", copy.copy(later))
    assert bound() == now


def test_use_inside_what_was_bound() -> None:
    def inside() -> list[str]:
        with kdk.use("triton"):
            seen = [current("cube")]
        return [*seen, current("cube")]

    with kdk.use("reference"):
        bound = bind(inside)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert bound() == ["triton", "reference"]
    assert current("cube") == ""
