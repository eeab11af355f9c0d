"""Arguments of an operator's kernels without data: what a compiler needs to know of them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tests.inputs import cases, results, shape

import kdk.ops  # noqa: F401  (registers the operators)
from kdk.backends.pallas.launch import prepare
from kdk.cases import Dim
from kdk.dispatch import kernel_file, load_kernel
from kdk.op import Op
from kdk.registry import OPERATORS
from kdk_bench.drawing import scalar

DIRECTIONS = ("forward", "backward")
ODD = (131, 67, 259, 3, 5, 7)
KERNELS = [(name, d) for name in OPERATORS for d in DIRECTIONS if kernel_file(OPERATORS[name].op, "pallas", d)]


def odd_sizes(dims: Mapping[str, Dim]) -> dict[str, int]:
    """Sizes that fill no tile, as far as the restrictions leave it."""
    sizes = dict(zip(dims, ODD))
    for _ in range(2):  # a limit may name a letter that comes later
        for letter, dim in dims.items():
            limit = sizes[dim.at_most] if dim.at_most else sizes[letter]
            step = sizes[dim.multiple] if isinstance(dim.multiple, str) else dim.multiple
            sizes[letter] = max(min(sizes[letter], limit) // step, 1) * step
    return sizes


def kernel(op: Op, direction: str) -> Any:
    """The module with a direction's Pallas kernel."""
    prepare()
    name = kernel_file(op, "pallas", direction)
    assert name is not None
    return importlib.import_module(name)


def arguments(op: Op, direction: str, sizes: Mapping[str, int], dtype: torch.dtype, scalars: Mapping[str, Any]) -> tuple[Any, ...]:
    """Positional arguments of a kernel: meta tensors, the usual scalars or those given, and all gradients needed."""
    usual = {name: scalar(op, name, values[0]) for name, values in cases(op).scalars.items()} | dict(scalars)
    usual |= {name: sizes[letter] for letter, name in op.sized.items()}

    def empty(name: str) -> torch.Tensor:
        of = torch.int32 if name in op.indexes else dtype
        return torch.empty(shape(op.shapes[name], sizes), dtype=of, device="meta")

    have = {name: empty(name) if name in op.tensors else usual[name] for name in op.arguments}
    if direction == "forward":
        return tuple(have.values())
    everything = results(op.reference(**have))
    have |= zip((*op.outputs, *op.saved), everything)
    assert op.backward is not None
    reads = list(inspect.signature(op.backward).parameters)[len(op.outputs) : -1]
    return (*everything[: len(op.outputs)], *(have[name] for name in reads), ",".join(op.uses))


def direct(name: str, direction: str, case: str) -> tuple[Any, ...]:
    """The arguments of a torch operator: "model" is its primary case in bfloat16, "odd" sizes that fill no tile in float32."""
    op = OPERATORS[name].op
    model = cases(op).models[0]
    if case == "model":
        return arguments(op, direction, model.sizes, torch.bfloat16, model.scalars)
    return arguments(op, direction, odd_sizes(cases(op).dims), torch.float32, {})


def call(name: str, direction: str, case: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An operator's kernel, and what it is called with."""
    prepare()
    found = load_kernel(OPERATORS[name].op, "pallas", direction)
    assert found is not None
    return found.function, found.arguments(*direct(name, direction, case))
