"""What an operator does not take: an InputError with code, value, limit and way out, and its text under torch.compile too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.inputs import arguments
from torch import Tensor

import kdk.ops
from kdk import registry
from kdk.errors import InputError
from kdk.op import Op
from kdk.sharding import labels, letters

OWN = dir(kdk.ops)
Values = dict[str, Any]


def changed(values: Values, name: str, change: Callable[[Tensor], Tensor]) -> Values:
    return {**values, name: change(values[name])}


def missing(op: Op) -> Iterator[Values]:
    """None in place of each tensor that may not be left out: torch itself takes it for a tensor."""
    for name in op.tensors:
        if name not in op.optional:
            yield {**arguments(op), name: None}


def ranks(op: Op) -> Iterator[Values]:
    """A scalar in place of each tensor that has a dimension of its own; a dimension too many where their number is fixed."""
    for name in op.tensors:
        if all(letter.startswith("*") for letter in op.shapes[name].split()):
            continue  # any number of dimensions is right
        yield changed(arguments(op), name, lambda t: t.new_ones(()))
        if "*" not in op.shapes[name]:
            yield changed(arguments(op), name, lambda t: t[None].repeat(2, *[1] * t.dim()) if t.dim() < 4 else t[None])


def sizes(op: Op) -> Iterator[Values]:
    """Each letter that several tensors have, one larger in one of them."""
    for letter in {letter for name in op.tensors for letter in letters(op.shapes[name])}:
        having = [name for name in op.tensors if letter in letters(op.shapes[name])]
        for name in having if len(having) > 1 else ():
            at = labels(op.shapes[name], arguments(op)[name].shape).index((letter, 0))
            yield changed(arguments(op), name, lambda t, at=at: torch.cat([t, t.narrow(at, 0, 1)], at))


def devices(op: Op) -> Iterator[Values]:
    """In one of several tensors another than in the rest."""
    for name in op.tensors if len(op.tensors) > 1 else ():
        yield changed(arguments(op), name, lambda t: t.to("meta"))


def dtypes(op: Op) -> Iterator[Values]:
    """Everywhere one that no operator has; in one tensor another than in the rest."""
    strange = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
    for dtype in strange:
        yield {name: v.to(dtype) if isinstance(v, Tensor) else v for name, v in arguments(op).items()}
    alone = len(set(op.tensors) - set(op.indexes)) == 1
    for name in op.tensors:
        other = [torch.float16] if name in op.indexes else [torch.int64] if alone else [torch.int64, torch.float16]
        for dtype in (torch.bool, torch.complex64, torch.float8_e4m3fn, *other):
            yield changed(arguments(op, torch.bfloat16), name, lambda t, dtype=dtype: t.to(dtype))


def scalars(op: Op) -> Iterator[Values]:
    for eps in (-1e-6, -math.inf, math.nan) if "eps" in op.arguments else ():
        yield {**arguments(op), "eps": eps}


def rotary(op: Op) -> Iterator[Values]:
    """Tables of an odd size, or of more than there is to turn."""
    values = arguments(op)
    for size in (1, 3, values["q"].shape[-1] + 2) if op.name == "rope" else ():
        yield {**values, **{name: torch.ones(*values[name].shape[:-1], size) for name in ("cos", "sin")}}


KINDS = {f.__name__: f for f in (missing, ranks, sizes, devices, dtypes, scalars, rotary)}
CASES = [(name, kind) for name in OWN for kind, make in KINDS.items() if list(make(registry.OPERATORS[name].op))]


def refused(function: Callable[..., Any], values: Values) -> InputError:
    with pytest.raises(InputError) as caught:
        function(**values)
    error = caught.value
    assert error.code and error.value is not None and error.limit and error.way_out, error.text
    assert error.code in error.text and str(error.value) in error.text and error.limit in error.text and error.way_out in error.text
    return error


def test_every_operator_has_every_kind() -> None:
    for name in OWN:
        op = registry.OPERATORS[name].op
        expected = (
            {"missing", "ranks", "dtypes"}
            | ({"devices"} if len(op.tensors) > 1 else set())
            | ({"sizes"} if list(sizes(op)) else set())
            | ({"scalars"} if "eps" in op.arguments else set())
        )
        assert {kind for own, kind in CASES if own == name} == expected | ({"rotary"} if name == "rope" else set())


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_refused(name: str, kind: str) -> None:
    """By the public function, by the torch operator, and by the reference that use("reference") inlines: in the same words."""
    operator = registry.OPERATORS[name]
    for values in KINDS[kind](operator.op):
        error = refused(operator.call, values)
        assert refused(operator.forward, values).text == error.text
        with kdk.use("reference"):
            assert refused(operator.call, values).text == error.text


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_refused_under_compile(name: str, kind: str) -> None:
    """Dynamo wraps the exception; the text comes through. The first and the last case of the kind."""
    operator = registry.OPERATORS[name]
    cases = list(KINDS[kind](operator.op))
    for values in (cases[0], cases[-1]):
        error = refused(operator.call, values)
        torch._dynamo.reset()
        with pytest.raises(Exception) as caught:
            torch.compile(lambda **v: operator.call(**v), backend="eager", fullgraph=True)(**values)
        assert error.text in str(caught.value)


def test_arguments_that_are_right_pass() -> None:
    """The cases above differ from these in one thing each."""
    for name in OWN:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            registry.OPERATORS[name].call(**arguments(registry.OPERATORS[name].op, dtype))
        meta = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in arguments(registry.OPERATORS[name].op).items()}
        registry.OPERATORS[name].call(**meta)


def test_a_second_call_with_another_dtype_is_checked_too() -> None:
    """What an operator remembers of a call it took must not stand for one that it does not take."""
    x, weight = torch.ones(2, 4), torch.ones(4)
    kdk.ops.rms_norm(x, weight, 1e-6)
    refused(kdk.ops.rms_norm, {"x": x.long(), "weight": weight, "eps": 1e-6})
    kdk.ops.rms_norm(x, weight, 1e-6)


def test_integers_are_what_the_declaration_says() -> None:
    """An operator without gradients, too, takes its working dtypes alone."""
    with pytest.raises(InputError, match="KDK-DTYPE"):
        registry.OPERATORS["positions"].call(torch.tensor([[3, 1, 2]]))
