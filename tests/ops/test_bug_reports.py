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
from torch import Tensor

import kdk
import kdk.ops
from kdk.dispatch import kernel_file
from kdk.registry import OPERATORS
from kdk_bench.numerics import judge, same_bits

TARGETS = {"triton": "sm_90", "pallas": "v6e", "nki": "trn2"}
NAMES = [n for n, o in OPERATORS.items() if o.op.package.startswith("kdk_kernels.")]
ROWS = [
    (name, implementation)
    for name in NAMES
    for implementation in ("reference", *TARGETS)
    if implementation == "reference" or kernel_file(OPERATORS[name].op, implementation, "forward")
]


@pytest.fixture(params=ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def row(request: pytest.FixtureRequest) -> Iterator[tuple[str, Callable[..., Any]]]:
    """An operator and its public function under an implementation; forward must not fall back."""
    name, implementation = request.param
    choice = kdk.use("reference") if implementation == "reference" else kdk.simulate(TARGETS[implementation])
    with choice, kdk.record() as ran:
        yield name, getattr(kdk.ops, name)
    refused = [r for r in ran.rows if r.how == "refused" and r.direction == "forward"]
    assert not refused, refused


def reference(name: str, arguments: dict[str, Any], grads: list[Tensor] | None = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs in float64 and, for given gradients, those of the differentiable inputs."""
    wide = {n: a.detach().double().clone() if isinstance(a, Tensor) else a for n, a in arguments.items()}
    leaves = {n: wide[n].requires_grad_() for n in OPERATORS[name].op.uses}
    with kdk.use("reference"):
        outputs = inputs.results(getattr(kdk.ops, name)(**wide))
    if grads is None:
        return [o.detach() for o in outputs], {}
    found = torch.autograd.grad(outputs, list(leaves.values()), [g.double() for g in grads])
    return [o.detach() for o in outputs], dict(zip(leaves, found))


def agree(got: Tensor, oracle: Tensor, longest: int = 4096) -> None:
    verdict = judge(got.detach(), oracle.to(got.dtype), oracle, longest=longest)
    assert verdict.accepted, verdict.reason


def run(name: str, call: Callable[..., Any], arguments: dict[str, Any], shape_grad: Callable[[Tensor], Tensor]) -> None:
    """Forward and backward under the fixture's choice agree with float64."""
    leaves = {n: arguments[n].requires_grad_() for n in OPERATORS[name].op.uses}
    outputs = inputs.results(call(**arguments))
    grads = [shape_grad(o.detach()) for o in outputs]
    oracle, oracle_grads = reference(name, arguments, grads)
    for got, right in zip(outputs, oracle):
        agree(got, right)
    for n, got in zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), grads)):
        agree(got, oracle_grads[n])


def test_an_input_that_autograd_saved_is_not_written_to(row: tuple[str, Callable[..., Any]]) -> None:
    """Liger#272: exp saves its result; a kernel that writes a gradient into it makes exp's own gradient wrong."""
    name, call = row
    op = OPERATORS[name].op
    arguments = inputs.arguments(op)
    leaves = {n: (arguments[n] / 4).requires_grad_() for n in op.uses}
    through = {**arguments, **{n: leaf.exp() for n, leaf in leaves.items()}}
    outputs = inputs.results(call(**through))
    got = torch.autograd.grad(sum(o.sum() for o in outputs), list(leaves.values()))
    wide = {n: leaf.detach().double().requires_grad_() for n, leaf in leaves.items()}
    with kdk.use("reference"):
        again = inputs.results(
            getattr(kdk.ops, name)(
                **{n: a.double() if isinstance(a, Tensor) else a for n, a in arguments.items() if n not in wide},
                **{n: leaf.exp() for n, leaf in wide.items()},
            )
        )
    for g, right in zip(got, torch.autograd.grad(sum(o.sum() for o in again), list(wide.values()))):
        agree(g, right)


def test_no_gradient_is_needed(row: tuple[str, Callable[..., Any]]) -> None:
    """Liger#507: the result was 0.0 when the input did not require a gradient."""
    name, call = row
    arguments = inputs.arguments(OPERATORS[name].op)
    oracle, _ = reference(name, arguments)
    for got, right in zip(inputs.results(call(**arguments)), oracle):
        agree(got, right)
        assert not got.requires_grad


@pytest.mark.parametrize("width", [1536, 123, 41])
def test_widths_that_are_no_power_of_two(row: tuple[str, Callable[..., Any]], width: int) -> None:
    """Liger#518: masked lanes counted into the variance."""
    name, call = row
    op = OPERATORS[name].op
    last = list(inputs.cases(op).dims)[-1]
    run(name, call, inputs.arguments(op, **{last: width}), torch.randn_like)


def test_the_inputs_are_used_again(row: tuple[str, Callable[..., Any]]) -> None:
    """unsloth#5001: q and k were rotated in place, so a second use saw other values."""
    name, call = row
    arguments = inputs.arguments(OPERATORS[name].op, torch.bfloat16)
    before = {n: a.clone() for n, a in arguments.items() if isinstance(a, Tensor)}
    first = inputs.results(call(**arguments))
    second = inputs.results(call(**arguments))
    assert all(same_bits(arguments[n], b) for n, b in before.items())
    assert all(same_bits(a, b) for a, b in zip(first, second))


def test_halves_of_a_wider_tensor(row: tuple[str, Callable[..., Any]]) -> None:
    """kernels-community#106: a, b = x.chunk(2, -1) has the row stride of x; it was taken for contiguous."""
    name, call = row
    arguments = inputs.arguments(OPERATORS[name].op)
    views = {n: torch.cat([torch.full_like(a, 1e3), a], -1).chunk(2, -1)[1] for n, a in arguments.items() if isinstance(a, Tensor)}
    run(name, call, {**arguments, **{n: v.detach() for n, v in views.items()}}, torch.randn_like)


@pytest.mark.parametrize("kind", ["transposed", "expanded"])
def test_gradients_that_are_not_contiguous(row: tuple[str, Callable[..., Any]], kind: str) -> None:
    """FlagGems#1068: a transposed gradient, and the stride-0 gradient of out.sum(), gave NaN."""
    name, call = row

    def grad(like: Tensor) -> Tensor:
        if kind == "expanded":
            return torch.ones((), dtype=like.dtype).expand(like.shape)
        return torch.randn_like(like).transpose(-1, -2).contiguous().transpose(-1, -2)

    run(name, call, inputs.arguments(OPERATORS[name].op), grad)


def test_empty_inputs(row: tuple[str, Callable[..., Any]]) -> None:
    """FlagGems#5501, #6074, #6333: numel() == 0 raised ZeroDivisionError."""
    name, call = row
    op = OPERATORS[name].op
    for letter, dim in inputs.cases(op).dims.items():
        if dim.minimum == 0:
            arguments = inputs.arguments(op, grad=True, **{letter: 0})
            outputs = inputs.results(call(**arguments))
            for got, right in zip(outputs, reference(name, arguments)[0]):
                assert got.shape == right.shape and got.dtype == torch.float32
            grads = torch.autograd.grad(sum(o.sum() for o in outputs), [arguments[n] for n in op.uses])
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
    oracle, _ = reference(name, arguments)
    with kdk.use("triton"), kdk.strict():
        outputs = inputs.results(getattr(kdk.ops, name)(**{**arguments, **far}))
    for got, right in zip(outputs, oracle):
        agree(got, right)
