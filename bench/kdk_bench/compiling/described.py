"""Arguments of an operator's kernels without data: what a compiler needs to know of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kdk.cases import Case
from kdk.op import Op
from kdk_bench.declared_cases import cases_of
from kdk_bench.generate import Problem, shape


def problem_of(op: Op, case: Case) -> Problem:
    """A model's case, all gradients needed. A starred letter is one dimension; scalars that it does not name are the usual."""
    usual = {name: values[0] for name, values in cases_of(op).scalars.items()}
    lead = {letter: (size,) for letter, size in case.sizes.items()}
    return Problem(case.name, case.sizes, lead, usual | dict(case.scalars), needs=tuple(op.uses))


def arguments(op: Op, direction: str, case: Case, dtype: str) -> tuple[Any, ...]:
    """Positional arguments of a direction's kernel, tensors on the meta device: what the operator's body gets, contiguous.

    The backward's are what the reference returns for such inputs; no gradient comes back from an output of integers.
    """
    problem = problem_of(op, case)
    working = getattr(torch, dtype)

    def empty(name: str) -> Tensor:
        return torch.empty(shape(op, name, problem), dtype=working, device="meta")

    have: Mapping[str, Any] = {name: empty(name) if name in op.tensors else problem.scalars[name] for name in op.arguments}
    if direction == "forward":
        return tuple(have.values())
    assert op.backward is not None
    results = op.reference(*have.values())
    results = results if isinstance(results, tuple) else (results,)
    gradients = [torch.empty_like(r) if r.is_floating_point() else None for r in results[: len(op.outputs)]]
    available = {**have, **dict(zip((*op.outputs, *op.saved), results))}
    keep = {read for name in problem.needs for read in op.uses[name]}
    parameters = list(inspect.signature(op.backward).parameters)[len(op.outputs) : -1]
    reads = [None if isinstance(available[n], Tensor) and n not in keep else available[n] for n in parameters]
    return (*gradients, *reads, ",".join(problem.needs))
