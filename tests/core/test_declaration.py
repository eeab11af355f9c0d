"""A declaration that contradicts itself is refused when it is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kdk import Op
from kdk.compare import Choice, Quantised
from kdk.errors import DeclarationError


def double(x: Tensor, times: int = 2) -> tuple[Tensor, Tensor]:
    """x times a number.

    And more.
    """
    return x * times, x.sum(-1)


def double_backward(grad: Tensor, times: int, needs: str) -> Tensor:
    return grad * times


def declare(**changes: Any) -> Op:
    usual: dict[str, Any] = {
        "reference": double,
        "check": lambda x, times=2: None,
        "kind": "row",
        "outputs": ("y",),
        "saved": ("sums",),
        "shapes": {"x": "*N H", "y": "*N H", "sums": "*N"},
        "backward": double_backward,
        "uses": {"x": ()},
    }
    return Op(**{**usual, **changes})


def test_what_follows_from_it() -> None:
    op = declare()
    assert (op.name, op.tensors, list(op.arguments), op.summary) == ("double", ("x",), ["x", "times"], "x times a number.")
    assert op.function("forward") is double and op.function("backward") is double_backward


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shapes": {"x": "*N H", "y": "*N H", "sums": "*N", "z": "H"}}, "`shapes` names 'z'.*x, y, sums"),
        ({"shapes": {"x": "*N H", "y": "*N H"}}, "`shapes` lacks 'sums'"),
        ({"uses": {"z": ()}}, "`uses` names 'z'"),
        ({"uses": {}}, "`backward` and `uses` go together"),
        ({"backward": None}, "`backward` and `uses` go together"),
        ({"fake": lambda x: None}, r"its `fake` takes \(x\); what double takes: \(x, times\)"),
        ({"fake_backward": lambda grad, x, needs: None}, r"its `fake_backward` takes .* what double_backward takes"),
        ({"backward": None, "uses": {}, "fake_backward": double_backward}, "`fake_backward` without a `backward`"),
        ({"mixed": {"z": "float32"}}, "`mixed` names 'z'"),
        ({"longest": {"z": "H"}}, "`longest` names 'z'"),
        ({"ranges": {"z": (0.0, 1.0)}}, "`ranges` names 'z'"),
        ({"ranges": {"x": (1.0, 1.0)}}, r"`ranges` says .x.: .1.0, 1.0.; a tensor argument of floating-point numbers"),
        ({"kind": "rows"}, "`kind` is 'rows'; elementwise, row or algorithmic"),
        ({"shapes": {"x": "**N H", "y": "*N H", "sums": "*N"}}, r"`shapes` says 'x': '\*\*N H'; letters"),
        ({"shapes": {"x": "*N 3", "y": "*N H", "sums": "*N"}}, r"`shapes` says 'x': '\*N 3'; letters"),
        ({"longest": {"y": "Q"}}, "`longest` says 'y': 'Q'; the letters are H, N"),
        ({"longest": {"grad z": "H"}}, "`longest` names 'grad z'"),
        ({"independent": ("Z",)}, "`independent` names 'Z'; letters that an argument and an output have"),
        ({"independent": ("H",), "longest": {"sums": "H"}}, "`independent` names 'H'; `longest` says that 'sums' sums over it"),
        ({"independent": ("N",), "shapes": {"x": "N N", "y": "N N", "sums": "N"}}, "`independent` names 'N'; 'x' has it twice"),
        ({"uses": {"x": ("z",)}}, "`uses` says that the gradient of 'x' reads 'z'"),
        ({"uses": {"x": ("x", "y", "times")}}, "`uses` says that the gradient of 'x' reads 'times'.*x, y, sums"),
        ({"outputs": ("y", "sums"), "saved": ()}, r"its backward takes \(grad, times, needs\); one gradient per output"),
        ({"saved": (), "shapes": {"x": "*N H", "y": "*N H"}}, r"the reference is annotated to return 2 result\(s\)"),
        ({"backward": lambda grad, scale, needs: grad}, r"its backward takes \(grad, scale, needs\)"),
        ({"backward": lambda grad, times: grad}, r"its backward takes \(grad, times\)"),
        ({"indexes": {"z": "H"}}, "`indexes` names 'z'"),
        ({"indexes": {"x": "H"}}, "`indexes` names 'x'; tensor arguments of integers, which have no gradient"),
        ({"indexes": {"x": "Z"}, "uses": {}, "backward": None}, "`indexes` says that 'x' points into 'Z'"),
        ({"indexes": {"x": "N"}, "uses": {}, "backward": None, "independent": ("N",)}, "`indexes` says that 'x' points into 'N'"),
        ({"sentinels": {"x": "times"}}, "`sentinels` says 'x': 'times'; a tensor of `indexes`"),
        ({"sized": {"H": "many"}}, "`sized` says 'H': 'many'; the scalar arguments are times"),
        ({"choice": Choice(("x",), lambda *a: a, lambda *a: a)}, "`choice` names 'x'; its results are y, sums"),
        ({"quantised": {"y": Quantised("sums", lambda a: a)}}, "`quantised` says 'y' with scale 'sums'"),
        ({"layouts": ("channels_first",)}, "`layouts` names 'channels_first'"),
        ({"backward_by": "other"}, "`backward_by` and `backward_as` go together"),
    ],
)
def test_contradictions(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=f"operator double: {message}"):
        declare(**changes)


def test_it_is_not_changed_later() -> None:
    with pytest.raises(AttributeError):
        declare().kind = "algorithmic"  # type: ignore[misc]
    assert torch.equal(declare().reference(torch.ones(2))[0], torch.full((2,), 2.0))
