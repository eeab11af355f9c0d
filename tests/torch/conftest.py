"""The toy operators of tests/toys stand beside kdk's own while these tests run; a choice does not outlive its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.inputs import TOYS, toy_operators

import kdk.ops
from kdk import registry, selection
from kdk.torch_library import Operator

OWN = dir(kdk.ops)
TOY_NAMES = sorted(p.parent.name for p in TOYS.glob("*/reference.py"))


@pytest.fixture(autouse=True, scope="module")
def toys() -> Iterator[None]:
    registry.OPERATORS.update(toy_operators())
    yield
    for name in toy_operators():
        del registry.OPERATORS[name]


@pytest.fixture(autouse=True)
def no_choice_left() -> Iterator[None]:
    before = dict(selection.DEFAULT)
    yield
    assert selection.LOCAL.choice == {}
    selection.DEFAULT.clear()
    selection.DEFAULT.update(before)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`operator`: every one. `differentiable`: those with a backward."""
    for fixture in ("operator", "differentiable"):
        if fixture in metafunc.fixturenames:
            names = [*OWN, *TOY_NAMES]
            if fixture == "differentiable":
                names = [name for name in names if has_backward(name)]
            metafunc.parametrize(fixture, names, indirect=True)


def has_backward(name: str) -> bool:
    return (toy_operators().get(name) or registry.OPERATORS[name]).op.backward is not None


@pytest.fixture
def operator(request: pytest.FixtureRequest) -> Operator:
    return registry.OPERATORS[request.param]


@pytest.fixture
def differentiable(request: pytest.FixtureRequest) -> Operator:
    found = registry.OPERATORS[request.param]
    assert found.op.backward is not None
    return found
