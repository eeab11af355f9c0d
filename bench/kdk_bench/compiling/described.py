"""Arguments of an operator's kernels without data: what a compiler needs to know of them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from kdk.cases import Case, Cases
from kdk.op import Op
from kdk_bench.declared_cases import cases_of
from kdk_bench.drawing import scalar
from kdk_bench.expectation import outputs_of
from kdk_bench.generate import model_problem, shape


def arguments(op: Op, direction: str, case: Case, dtype: str, cases: Cases | None = None) -> tuple[Any, ...]:
    """Positional arguments of a direction, tensors on the meta device: what the operator's body gets, contiguous, at full size.

    Nothing is left out, and a starred letter is one dimension. The backward's are what the reference returns for such inputs; no
    gradient comes back from an output of integers or a quantised one.
    """
    problem = model_problem(op, cases or cases_of(op), case, case.sizes, {letter: (size,) for letter, size in case.sizes.items()})
    working = getattr(torch, dtype)

    def value(name: str) -> Any:
        if name not in op.tensors:
            return scalar(op, name, problem.scalars[name])
        own = getattr(torch, problem.index_dtype) if name in op.indexes else working
        return torch.empty(shape(op, name, problem), dtype=own, device="meta")

    have = {name: value(name) for name in op.arguments}
    if direction == "forward":
        return tuple(have.values())
    forward = op.described("forward")
    assert op.backward is not None and forward is not None
    results = dict(zip((*op.outputs, *op.saved), outputs_of(forward(*have.values()))))
    gradients = [_gradient(results[name]) if name not in op.quantised else None for name in op.outputs]
    available = {**have, **results}
    keep = {read for name in problem.needs for read in op.uses[name]}
    reads = list(inspect.signature(op.backward).parameters)[len(op.outputs) : -1]
    held = [None if isinstance(available[n], Tensor) and n not in keep else available[n] for n in reads]
    return (*gradients, *held, ",".join(problem.needs))


def _gradient(output: Tensor | None) -> Tensor | None:
    return torch.empty_like(output) if output is not None and output.is_floating_point() else None
