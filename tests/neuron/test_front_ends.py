"""The NKI kernels of all operators are written as both front ends of the vendor's toolchain take them.

NKI 0.6 parses a subset of Python, which the emulator's parser front end knows; NKI 0.7 traces Python. TorchNeuron caches
compiled kernels by the values of what is not a tensor, and looks for tensors among the arguments, not inside them.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.inputs import arguments, cases, floating, results, total, valid_sizes
from tests.judging import Right
from torch import Tensor

import kdk.ops
from kdk import registry
from kdk.backends.nki import emulator, launch, simulate
from kdk.dispatch import kernel_file
from kdk.errors import RefusedError
from kdk.op import Op
from kdk_bench.drawing import scalar

OPERATORS = [name for name in dir(kdk.ops) if kernel_file(registry.OPERATORS[name].op, "nki", "forward")]


def check_argument(value: Any, inside: bool = False) -> None:
    """What both front ends take: tensors, None, bool, 32-bit int, float, str, and tuples of these without tensors."""
    if isinstance(value, tuple):
        for part in value:
            check_argument(part, inside=True)
    elif isinstance(value, Tensor):
        assert not inside, "a tensor inside a tuple"
        assert value.is_contiguous()
    elif isinstance(value, int) and not isinstance(value, bool):
        assert -(2**31) <= value < 2**31
    else:
        assert value is None or type(value) in (bool, float, str), type(value)


def kernels(op: Op) -> set[str]:
    """The names of the kernels in an operator's files."""
    launch.prepare()
    found = set()
    for direction in ("forward", "backward"):
        name = kernel_file(op, "nki", direction)
        if name:
            module = importlib.import_module(name)
            found |= {k.__name__ for k in vars(module).values() if isinstance(k, emulator.Kernel) and k.__module__ == name}
    return found


def subsets(names: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [s for size in range(1, len(names) + 1) for s in itertools.combinations(names, size)]


def combinations(op: Op) -> Iterator[tuple[dict[str, Any], tuple[str, ...], tuple[int, ...]]]:
    """Arguments, needed gradients, and the outputs that gradients flow back from.

    With the usual scalars every set of the others, and without each tensor that may be left out. All other scalars that go
    together, each with all gradients and with the sets in turn: every one with every one would be hundreds of runs.
    """
    own = cases(op).scalars
    everything = [n for n, t in enumerate(results(op.reference(**arguments(op)))[: len(op.outputs)]) if floating(t)]
    sets = list(itertools.product([(), *subsets(list(op.uses))], subsets(everything)))
    turn = itertools.cycle(sets)
    for i, values in enumerate(itertools.product(*map(dict.fromkeys, own.values()))):
        scalars = {name: scalar(op, name, value) for name, value in zip(own, values)}
        sizes = valid_sizes(op, dict(zip(own, values)))
        if sizes is not None:
            for needs, outputs in sets if i == 0 else dict.fromkeys((sets[-1], next(turn))):
                yield arguments(op, grad=needs, **sizes) | scalars, needs, outputs
        for left_out in op.optional if i == 0 and sizes is not None else ():
            needs = tuple(n for n in op.uses if n != left_out)
            yield arguments(op, grad=needs, **sizes) | scalars | {left_out: None}, needs, sets[-1][1]


def again(given: dict[str, Any]) -> dict[str, Any]:
    return {n: a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for n, a in given.items()}


def on_a_chip(call: Callable[..., Any], given: dict[str, Any]) -> tuple[Tensor, ...]:
    """The smaller chip, unless it lacks a number format."""
    try:
        with kdk.strict(), kdk.use("nki@trn2"):
            return results(call(**given))
    except RefusedError as error:
        assert "has no float8" in str(error), error
        with kdk.strict(), kdk.use("nki@trn3"):
            return results(call(**given))


@pytest.mark.parametrize("frontend", ["parser", "tracer"])
@pytest.mark.parametrize("name", OPERATORS)
def test_kernels(name: str, frontend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[str] = set()

    def runner(target: str) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any) -> Any:
            for a in args:
                check_argument(a)
            result = emulator.simulate(kernel, target=target, frontend=frontend)(*args)
            launched.add(kernel.__name__)
            return result

        return run

    monkeypatch.setattr(simulate, "_runner", runner)
    op, call = registry.OPERATORS[name].op, registry.OPERATORS[name].call
    for ours, needs, outputs in combinations(op):
        theirs = again(ours)
        got = on_a_chip(call, ours)
        Right(op, theirs, got).check()
        if needs and got[outputs[0]].requires_grad:
            with kdk.use("reference"):
                want = results(call(**theirs))
            total([got[i] for i in outputs]).backward()
            if (loss := total([want[i] for i in outputs])).requires_grad:  # an output may not depend on what is needed
                loss.backward()
            grads = [(ours[n].grad, theirs[n].grad) for n in needs]
            assert [a is None for a, _ in grads] == [b is None for _, b in grads]
            for pair in grads:
                if pair[0] is not None:
                    torch.testing.assert_close(*pair)
    assert kernels(op) <= launched
