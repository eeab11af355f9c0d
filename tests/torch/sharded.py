"""Cases for two processes: every operator on DTensors, compared with one process."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tests.inputs import TOYS, arguments, results
from tests.torch.two_processes import Case
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import kdk.ops
from kdk import registry, sharding
from kdk.errors import ShardingError
from kdk.op import Op

Label = tuple[str, int]
Places = dict[str, Placement]
SIZES = {"rope": {"B": 2, "S": 3, "Hq": 4, "Hk": 2, "D": 6, "R": 4}, "cube": {"H": 8}}  # uneven where nothing asks for even


def values_of(op: Op, grad: Any = True) -> dict[str, Any]:
    """Float64: the error of a sum in another order is then far from that of a wrong sum."""
    return arguments(op, torch.float64, grad=grad, **SIZES.get(op.name, {}))


def dimensions(op: Op) -> list[Label]:
    """Every dimension of every tensor argument, those of a starred letter one by one."""
    values = values_of(op)
    return list(dict.fromkeys(d for name in op.tensors for d in sharding.labels(op.shapes[name], values[name].shape) if d))


def places(op: Op, split: set[Label]) -> Places:
    """The arguments sharded along these dimensions."""
    values = values_of(op)
    found: Places = {}
    for name in op.tensors:
        dims = [i for i, d in enumerate(sharding.labels(op.shapes[name], values[name].shape)) if d in split]
        found[name] = Shard(dims[0]) if dims else Replicate()
    return found


def distribute(values: dict[str, Any], where: Places, mesh: Any) -> dict[str, Any]:
    new = dict(values)
    for name, place in where.items():
        new[name] = distribute_tensor(values[name].detach(), mesh, [place]).requires_grad_(values[name].requires_grad)
    return new


def flowing(outputs: Iterable[Tensor]) -> list[Tensor]:
    return [t for t in outputs if t.requires_grad]


def weights(t: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).reshape(t.shape)


def compare(op: Op, where: Places, mesh: Any, grad: Any = True) -> tuple[list[DTensor], dict[str, DTensor]]:
    """Outputs and gradients on two processes, equal to those on one. Returns the distributed ones."""
    call = registry.OPERATORS[op.name].call
    alone, values = values_of(op, grad), distribute(values_of(op, grad), where, mesh)
    expected, found = results(call(**alone)), results(call(**values))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a.full_tensor(), b)
    names = [n for n in op.uses if alone[n].requires_grad]
    if not names:
        return list(found), {}
    into = [distribute_tensor(weights(b), mesh, a.placements) for a, b in zip(flowing(found), flowing(expected))]
    gradients = torch.autograd.grad(flowing(found), [values[n] for n in names], into)
    wanted = torch.autograd.grad(flowing(expected), [alone[n] for n in names], [weights(t) for t in flowing(expected)])
    for a, b in zip(gradients, wanted):
        torch.testing.assert_close(a.full_tensor(), b)
    return list(found), dict(zip(names, gradients))


def splits(op: Op) -> list[set[Label]]:
    """The dimensions an operator may be sharded along, one by one; queries and keys by their heads together."""
    single = [{d} for d in dimensions(op) if d[0] in op.independent]
    return single + ([{("Hq", 0), ("Hk", 0)}] if op.name == "rope" else [])


def stays_sharded(op: Op, split: set[Label], mesh: Any) -> None:
    """Nothing is communicated, and what has the letter stays sharded."""
    where = places(op, split)
    call = registry.OPERATORS[op.name].call
    values = distribute(values_of(op), where, mesh)
    with CommDebugMode() as communication:
        found = results(call(**values))
        if flowing(found):
            torch.autograd.backward(flowing(found), [t.detach() for t in flowing(found)])
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    outputs, gradients = compare(op, where, mesh)
    letters = {letter for letter, _ in split}
    for name, t in zip(op.outputs, outputs):
        assert isinstance(t.placements[0], Shard) == bool(letters.intersection(sharding.letters(op.shapes[name])))
    for name, t in gradients.items():
        place = t.placements[0]
        if letters.intersection(sharding.letters(op.shapes[name])):
            assert place == where[name]
        elif op.name == "rope" or op.name == "scale_both":  # of the two outputs one is whole on both processes
            assert place == Replicate()
        else:
            assert place == Partial()


def replicated(op: Op, mesh: Any) -> None:
    outputs, gradients = compare(op, places(op, set()), mesh)
    assert {p for t in (*outputs, *gradients.values()) for p in t.placements} == {Replicate()}


def one_gradient_after_all(op: Op, mesh: Any) -> None:
    """DTensor remembers what it worked out for these shapes; other needed gradients are another question."""
    split = splits(op)[0]
    compare(op, places(op, split), mesh)
    for name in op.uses:
        _, gradients = compare(op, places(op, split), mesh, grad=(name,))
        assert list(gradients) == [name]
    compare(op, places(op, split), mesh)


def gathered(op: Op, dimension: Label, mesh: Any) -> None:
    """Sharded where the operator needs it whole: right, with a warning that says why; refused under strict."""
    where = places(op, {dimension})
    call = registry.OPERATORS[op.name].call
    reason = sharding.why_not(op, dimension[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(op, where, mesh)
    said = [str(w.message) for w in caught if issubclass(w.category, kdk.FallbackWarning)]
    assert said and all(f"sharded along {dimension[0]}, and {reason}" in text for text in said), said
    try:
        with kdk.strict():
            call(**distribute(values_of(op), where, mesh))
    except ShardingError as error:
        assert reason in error.text and "redistribute" in error.way_out
    else:
        raise AssertionError("strict did not raise")
    compare(op, where, mesh)  # DTensor remembers: no second warning, and no error left behind


def keeps_the_choice(op: Op, mesh: Any) -> None:
    """Each process runs the chosen kernel on its own rows, backward too, after the context has ended."""
    where = places(op, {("N", 0)})
    alone = arguments(op, grad=True)
    values = distribute(alone, where, mesh)
    with kdk.record() as ran:
        with kdk.simulate("trn2"):
            (found,) = results(registry.OPERATORS[op.name].call(**values))
        found.backward(distribute_tensor(weights(found), mesh, found.placements))
    assert [(row.direction, row.implementation, row.how, row.calls) for row in ran.rows] == [
        ("forward", "nki", "simulated", 1),
        ("backward", "nki", "simulated", 1),
    ]
    (expected,) = results(registry.OPERATORS[op.name].call(**alone))
    expected.backward(weights(expected))
    for name in op.uses:
        torch.testing.assert_close(values[name].grad.full_tensor(), alone[name].grad)


def cases(mesh: Any) -> Iterator[Case]:
    registry.load_directory(TOYS)
    yield "rms_norm keeps the choice", functools.partial(keeps_the_choice, registry.OPERATORS["rms_norm"].op, mesh)
    for name, operator in registry.OPERATORS.items():
        op = operator.op
        yield f"{name} replicated", functools.partial(replicated, op, mesh)
        for split in splits(op):
            label = " and ".join(f"{letter}{number or ''}" for letter, number in sorted(split))
            yield f"{name} along {label}", functools.partial(stays_sharded, op, split, mesh)
        yield f"{name} one gradient", functools.partial(one_gradient_after_all, op, mesh)
        for dimension in dimensions(op):
            if dimension[0] not in op.independent:
                yield f"{name} gathers {dimension[0]}", functools.partial(gathered, op, dimension, mesh)
