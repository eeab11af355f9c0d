"""Inputs from public bug reports on other projects' kernels. Every operator, every language that has the kernel, simulated.

Which report each test stands for is in its docstring (repository#thread). Faults of checks themselves (a kernel of zeros
passes, a tolerance is ignored, each side draws its own gradient) are in tests/bench/test_planted_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests import inputs
from tests.judging import Right, agree
from torch import Tensor

import kdk
import kdk.ops
from kdk.dispatch import kernel_file
from kdk.op import Op
from kdk.registry import OPERATORS
from kdk_bench.numerics import same_bits

TARGETS = {"triton": "sm_90", "pallas": "v6e", "nki": "trn2"}
NAMES = [n for n, o in OPERATORS.items() if o.op.package.startswith("kdk_kernels.")]
ROWS = [
    (name, implementation)
    for name in NAMES
    for implementation in ("reference", *TARGETS)
    if implementation == "reference" or kernel_file(OPERATORS[name].op, implementation, "forward")
]
DIFFERENTIABLE = [row for row in ROWS if OPERATORS[row[0]].op.uses]

Row = tuple[Op, Callable[..., Any]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`row`: every operator and implementation. `differentiable`: those that have gradients."""
    for fixture, rows in (("row", ROWS), ("differentiable", DIFFERENTIABLE)):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, rows, indirect=True, ids=["-".join(row) for row in rows])


def chosen(request: pytest.FixtureRequest) -> Iterator[Row]:
    """An operator and its function under an implementation; forward must not fall back."""
    name, implementation = request.param
    choice = kdk.use("reference") if implementation == "reference" else kdk.simulate(TARGETS[implementation])
    with choice, kdk.record() as ran:
        yield OPERATORS[name].op, OPERATORS[name].call
    refused = [r for r in ran.rows if r.how == "refused" and r.direction == "forward"]
    assert not refused, refused


row, differentiable = pytest.fixture(chosen, name="row"), pytest.fixture(chosen, name="differentiable")


def run(op: Op, call: Callable[..., Any], arguments: dict[str, Any], shape_grad: Callable[[Tensor], Tensor]) -> None:
    """Forward, and backward where there is one, under the fixture's choice agree with float64."""
    leaves = {n: arguments[n].requires_grad_() for n in op.uses}
    outputs = inputs.results(call(**arguments))
    right = Right(op, arguments, outputs)
    right.check()
    if leaves:
        flowing = inputs.floating(outputs)
        grads = [shape_grad(o.detach()) for o in flowing]
        wanted = right.gradients(grads)
        for n, got in zip(leaves, torch.autograd.grad(flowing, list(leaves.values()), grads)):
            agree(got, wanted[n], arguments[n].dtype)


def test_an_input_that_autograd_saved_is_not_written_to(differentiable: Row) -> None:
    """Liger#272: exp saves its result; a kernel that writes a gradient into it makes exp's own gradient wrong."""
    op, call = differentiable
    arguments = inputs.arguments(op)
    leaves = {n: (arguments[n] / 4).requires_grad_() for n in op.uses}
    through = {**arguments, **{n: leaf.exp() for n, leaf in leaves.items()}}
    outputs = inputs.results(call(**through))
    flowing = inputs.floating(outputs)
    got = torch.autograd.grad(sum(o.sum() for o in flowing), list(leaves.values()))
    wanted = Right(op, through, outputs).gradients([torch.ones_like(o) for o in flowing])
    for (n, leaf), g in zip(leaves.items(), got):
        agree(g, wanted[n] * leaf.detach().double().exp(), leaf.dtype)


def test_no_gradient_is_needed(row: Row) -> None:
    """Liger#507: the result was 0.0 when the input did not require a gradient."""
    op, call = row
    arguments = inputs.arguments(op)
    outputs = inputs.results(call(**arguments))
    Right(op, arguments, outputs).check()
    assert not any(o.requires_grad for o in outputs)


@pytest.mark.parametrize("width", [1536, 123, 41])
def test_widths_that_are_no_power_of_two(row: Row, width: int) -> None:
    """Liger#518: masked lanes counted into the variance."""
    op, call = row
    last = list(inputs.cases(op).dims)[-1]
    run(op, call, inputs.arguments(op, **{last: width}), torch.randn_like)


def test_the_inputs_are_used_again(row: Row) -> None:
    """unsloth#5001: q and k were rotated in place, so a second use saw other values."""
    op, call = row
    arguments = inputs.arguments(op, torch.bfloat16)
    before = {n: a.clone() for n, a in arguments.items() if isinstance(a, Tensor)}
    first = inputs.results(call(**arguments))
    second = inputs.results(call(**arguments))
    assert all(same_bits(arguments[n], b) for n, b in before.items())
    assert all(same_bits(a, b) for a, b in zip(first, second))


def test_halves_of_a_wider_tensor(row: Row) -> None:
    """kernels-community#106: a, b = x.chunk(2, -1) has the row stride of x; it was taken for contiguous."""
    op, call = row
    arguments = inputs.arguments(op)
    views = {n: torch.cat([torch.full_like(a, 1e3), a], -1).chunk(2, -1)[1] for n, a in arguments.items() if isinstance(a, Tensor)}
    run(op, call, {**arguments, **{n: v.detach() for n, v in views.items()}}, torch.randn_like)


@pytest.mark.parametrize("kind", ["transposed", "expanded"])
def test_gradients_that_are_not_contiguous(differentiable: Row, kind: str) -> None:
    """FlagGems#1068: a transposed gradient, and the stride-0 gradient of out.sum(), gave NaN."""
    op, call = differentiable

    def grad(like: Tensor) -> Tensor:
        if kind == "expanded":
            return torch.ones((), dtype=like.dtype).expand(like.shape)
        return torch.randn_like(like).transpose(-1, -2).contiguous().transpose(-1, -2)

    run(op, call, inputs.arguments(op), grad)


def test_empty_inputs(row: Row) -> None:
    """FlagGems#5501, #6074, #6333: numel() == 0 raised ZeroDivisionError."""
    op, call = row
    for letter, dim in inputs.cases(op).dims.items():
        if dim.minimum == 0:
            arguments = inputs.arguments(op, grad=True, **{letter: 0})
            outputs = inputs.results(call(**arguments))
            with kdk.use("reference"):
                wanted = inputs.results(OPERATORS[op.name].call(**arguments))
            assert [(o.shape, o.dtype) for o in outputs] == [(o.shape, o.dtype) for o in wanted]
            Right(op, arguments, outputs).check()
            if op.uses:
                grads = torch.autograd.grad(sum(o.sum() for o in inputs.floating(outputs)), [arguments[n] for n in op.uses])
                assert [g.shape for g in grads] == [arguments[n].shape for n in op.uses]
                assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("name", NAMES)
def test_offsets_past_two_to_the_31(name: str) -> None:
    """Liger#251, #803, #1246: rows * stride > 2^31 wrapped in int32. The rows lie far apart in memory that is never touched."""
    op = OPERATORS[name].op
    arguments = inputs.arguments(op, torch.bfloat16)
    far = {}
    for n, a in arguments.items():
        if isinstance(a, Tensor) and a.dim() > 1:
            gap = (2**31 + 64) // (a.shape[0] - 1)
            store = torch.empty(gap * (a.shape[0] - 1) + a[0].numel(), dtype=a.dtype)
            view = store.as_strided(a.shape, (gap, *a[0].contiguous().stride()))
            far[n] = view.copy_(a)
    with kdk.use("triton"), kdk.strict():
        outputs = inputs.results(OPERATORS[name].call(**{**arguments, **far}))
    Right(op, arguments, outputs).check()
