"""`Op.fake` and `Op.fake_backward`: the results of the reference in shape and dtype, for every operator that declares one."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.inputs import arguments, cases, results
from torch import Tensor

import kdk.ops
from kdk import registry
from kdk.op import Op

OWN = [registry.OPERATORS[name].op for name in dir(kdk.ops)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Described = list[tuple[torch.Size, torch.dtype, torch.device] | None]


def described(value: Any) -> Described:
    return [None if t is None else (t.shape, t.dtype, t.device) for t in results(value)]


def variants(op: Op, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Every choice of scalars, of optional tensors left out and of tensors in their other dtype; an empty one of every letter."""
    scalars = [[(name, value) for value in values] for name, values in cases(op).scalars.items()]
    switches = [(name, "without") for name in op.optional] + [(name, other) for name, other in op.mixed.items()]
    for chosen in itertools.product(*scalars):
        for on in itertools.product((False, True), repeat=len(switches)):
            values = {**arguments(op, dtype), **dict(chosen)}
            for (name, what), use in zip(switches, on):
                if use and values[name] is not None:
                    values[name] = None if what == "without" else values[name].to(getattr(torch, what))
            yield values
    for letter, dim in cases(op).dims.items():
        if not dim.minimum:
            yield arguments(op, dtype, **{letter: 0})


def backward_arguments(op: Op, values: dict[str, Any]) -> Iterator[list[Any]]:
    """Of one call of the forward: every set of needed gradients, without the tensors that none of them reads."""
    assert op.backward is not None
    everything = results(op.reference(**values))
    have = {**values, **dict(zip((*op.outputs, *op.saved), everything))}
    reads = list(inspect.signature(op.backward).parameters)[len(op.outputs) : -1]
    possible = [name for name in op.uses if values[name] is not None]
    for count in range(1, len(possible) + 1):
        for names in itertools.combinations(possible, count):
            read = {r for name in names for r in op.uses[name]}
            kept = [have[r] if r in read or not isinstance(have[r], Tensor) else None for r in reads]
            yield [*map(torch.ones_like, everything[: len(op.outputs)]), *kept, ",".join(names)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [op for op in OWN if op.fake], ids=lambda op: op.name)
def test_forward(op: Op, dtype: torch.dtype) -> None:
    assert op.fake is not None
    for values in variants(op, dtype):
        assert described(op.fake(**values)) == described(op.reference(**values))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [op for op in OWN if op.fake_backward], ids=lambda op: op.name)
def test_backward(op: Op, dtype: torch.dtype) -> None:
    assert op.fake_backward is not None and op.backward is not None
    for values in variants(op, dtype):
        for args in backward_arguments(op, values):
            assert described(op.fake_backward(*args)) == described(op.backward(*args))


def test_no_value_is_read() -> None:
    """On the meta device there are none."""
    declared = [op for op in OWN if op.fake]
    assert declared, "no operator declares a fake: these tests compare nothing"
    for op in declared:
        assert op.fake is not None
        values = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in arguments(op).items()}
        assert all(t.is_meta for t in results(op.fake(**values)))
