"""kdk on the device "neuron", in a process whose nki and torch_neuronx are the stand-ins of `vendor/`.

It shows that kdk follows the documented contract of nki_op and of nki.jit, on tensors that torch takes for a device's, eager
and compiled. It shows nothing about the vendor's packages or a Trainium: what rests on it alone is "declared".
Run by test_torch_neuron.py, which starts the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import nki
import pytest
import torch
import torch_neuronx
from functorch.compile import make_boxed_func
from tests.inputs import arguments, results, total
from tests.judging import Right
from tests.neuron.test_front_ends import OPERATORS
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import kdk.ops
from kdk import registry
from kdk.backends.nki import launch
from kdk.dispatch import load_kernel
from kdk.errors import FallbackWarning
from kdk_bench.check import Row, run_row
from kdk_bench.places import local_targets, place

# What a host function may do with floating-point numbers outside its kernels, on the device: views, copies, allocations, and the
# last sum of a split reduction.
LAYOUT = {"_copy_from", "as_strided", "cat", "clone", "copy_", "empty", "sum", "view"}


def on_device(given: dict[str, Any]) -> dict[str, Any]:
    return {n: a.detach().to("neuron").requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for n, a in given.items()}


def on_cpu(value: Any) -> tuple[Tensor, ...]:
    return tuple(t.detach().cpu() for t in results(value))


def inputs(name: str, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same arguments on the CPU and on the device, with gradients."""
    given = arguments(registry.OPERATORS[name].op, dtype, grad=True)
    return given, on_device(given)


def gradients(name: str, given: dict[str, Any]) -> list[Tensor]:
    return [given[n].grad.cpu() for n in registry.OPERATORS[name].op.uses]


def run(name: str, given: dict[str, Any]) -> Any:
    """The outputs; and the backward, where the operator has one."""
    outputs = registry.OPERATORS[name].call(**given)
    if registry.OPERATORS[name].op.uses:
        total(outputs).backward()
    return outputs


def directions(name: str) -> list[str]:
    return ["backward", "forward"] if registry.OPERATORS[name].op.uses else ["forward"]


def nki_ops(name: str) -> set[str]:
    """nki_op's names for the operator's kernels; a backward may be another operator's forward."""
    kernels = [load_kernel(registry.OPERATORS[name].op, "nki", direction) for direction in directions(name)]
    return {f"{k.module.__name__.split('.')[-2]}_{k.name}" for k in kernels if k is not None}


def ran(r: kdk.record) -> list[tuple[str, str, str, str]]:
    return sorted({(row.direction, row.implementation, row.how, row.target) for row in r.rows})


@pytest.fixture(autouse=True)
def chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(launch.OVERRIDE, "trn2")
    nki.CALLS.clear()
    torch_neuronx.INSIDE.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", OPERATORS)
def test_eager(name: str) -> None:
    """Forward and backward run the kernels, as nki_op's operators, and give what the reference gives."""
    given, moved = inputs(name)
    before = {n: a.detach().cpu() for n, a in moved.items() if isinstance(a, Tensor)}
    with kdk.strict(), kdk.record() as r:
        got = run(name, moved)
    assert all(t.device.type == "neuron" for t in results(got))
    assert ran(r) == [(direction, "nki", "device", "trn2") for direction in directions(name)]
    assert {c.how for c in nki.CALLS} == {"device"}
    Right(registry.OPERATORS[name].op, given, on_cpu(got)).check()
    with kdk.use("reference"):
        run(name, given)
    torch.testing.assert_close(gradients(name, moved), gradients(name, given))
    assert all(torch.equal(a, moved[n].detach().cpu()) for n, a in before.items())
    assert nki_ops(name) <= set(dir(torch.ops.kdk_nki))


@pytest.mark.parametrize("name", OPERATORS)
def test_outside_the_kernels_only_indices_are_computed(name: str) -> None:
    """What TorchNeuron might compute on the CPU, in silence: around a kernel integers are prepared, and numbers laid out."""
    _, moved = inputs(name)
    run(name, moved)
    of_numbers = {o.removeprefix("aten::").partition(".")[0] for o, numbers in torch_neuronx.INSIDE if numbers}
    assert of_numbers and of_numbers <= LAYOUT, of_numbers - LAYOUT


def test_unneeded_gradients_are_neither_computed_nor_given() -> None:
    given = on_device(arguments(registry.OPERATORS["rms_norm"].op, grad=("weight",)))
    kdk.ops.rms_norm(**given).sum().backward()
    assert given["x"].grad is None and given["weight"].grad.shape == given["weight"].shape
    call = nki.CALLS[-1]
    assert call.kernel == "rms_norm_backward_kernel" and call.arguments[-2:] == (False, True)


def graphs(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[list[str]]]:
    """`function` compiled, and the operators in each graph that a compiler for the device gets."""
    seen: list[list[str]] = []

    def compiler(module: torch.fx.GraphModule, example: Any) -> Any:
        seen.append([str(n.target) for n in module.graph.nodes if n.op == "call_function"])
        return make_boxed_func(module)

    return torch.compile(function, backend=aot_autograd(fw_compiler=compiler), fullgraph=True, dynamic=False), seen


@pytest.mark.parametrize("name", OPERATORS)
def test_compiled(name: str) -> None:
    """The compiler of a graph meets nki_op's operators and no operator of kdk's, which it would not know."""
    _, moved = inputs(name)
    _, again = inputs(name)
    want = run(name, again)

    compiled, seen = graphs(lambda **given: registry.OPERATORS[name].call(**given))
    with kdk.strict(), kdk.use("nki"), kdk.record() as r:
        got = compiled(**moved)
        if registry.OPERATORS[name].op.uses:
            total(got).backward()
    assert ran(r) == [(direction, "nki", "captured", "trn2") for direction in directions(name)]
    assert [sum(o.startswith("kdk_nki.") for o in graph) for graph in seen] == [1 for _ in directions(name)]
    assert not any(o.startswith("kdk.") for graph in seen for o in graph)
    assert {c.how for c in nki.CALLS[-len(seen) :]} == {"device"}
    assert all(torch.equal(a, b) for a, b in zip(on_cpu(got), on_cpu(want)))
    assert all(torch.equal(a, b) for a, b in zip(gradients(name, moved), gradients(name, again)))


def test_compiled_without_a_kernel() -> None:
    """What the kernel refuses stands in the graph as the reference's plain torch, recorded with the reason."""
    _, moved = inputs("rms_norm", torch.float64)
    compiled, seen = graphs(kdk.ops.rms_norm)
    with kdk.use("nki"), kdk.record() as r, pytest.warns(FallbackWarning, match="64-bit"):
        got = compiled(moved["x"].detach(), moved["weight"].detach(), 1e-5)
    assert {(row.implementation, row.how) for row in r.rows} == {("nki", "refused"), ("reference", "captured")}
    assert len(seen) == 1 and all(o.startswith(("aten.", "<built-in function getitem")) for o in seen[0])
    with kdk.use("reference"):
        want = kdk.ops.rms_norm(moved["x"], moved["weight"], 1e-5)
    torch.testing.assert_close(got.cpu(), want.detach().cpu())


def test_an_exported_program_keeps_the_operator() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return kdk.ops.rms_norm(x, weight, 1e-5)

    _, moved = inputs("rms_norm")
    with kdk.use("nki"):
        program = torch.export.export(Model(), (moved["x"].detach(), moved["weight"].detach()))
    assert "kdk.rms_norm.default" in str(program.run_decompositions().graph)


def test_on_cpu_tensors_the_simulator_of_the_vendor_runs() -> None:
    given, _ = inputs("rms_norm")
    with kdk.strict(), kdk.simulate("trn3"), kdk.record() as r:
        kdk.ops.rms_norm(**given)
    assert ran(r) == [("forward", "nki", "simulated", "trn3")]
    assert [(c.how, c.target) for c in nki.CALLS] == [("simulate", "trn3")]


def without_nki_op() -> ModuleType:
    package = ModuleType("torch_neuronx")
    package.__version__ = "2.9.0"  # type: ignore[attr-defined]
    return package


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.missing("neuron") is None and launch.missing("xla:neuron") is None and launch.missing("cpu") is None
    monkeypatch.setenv(launch.OVERRIDE, "inf2")
    assert launch.missing("neuron") == "NKI kernels need Trainium2 or Trainium3, this is inf2"
    monkeypatch.setitem(sys.modules, "torch_neuronx", without_nki_op())
    assert "torch_neuronx 2.9.0 has no nki_op" in str(launch.missing("neuron"))
    monkeypatch.setitem(sys.modules, "torch_neuronx", None)
    assert "torch_neuronx cannot be imported" in str(launch.missing("neuron"))
    monkeypatch.setattr("kdk.backends.nki.emulator.vendor_nki_available", lambda: False)
    assert "nki is not installed" in str(launch.missing("neuron")) and launch.missing("cpu") is None


def add_one(x: Tensor) -> Tensor:
    x += 1
    return x.clone()


def test_the_stand_in_keeps_the_contract() -> None:
    x = torch.zeros(3).to("neuron")
    with pytest.raises(ValueError, match="must have a type annotation"):
        torch_neuronx.nki_op("stand_in::without", mutates_args={})(lambda x: x)
    with pytest.raises(RuntimeError, match="writes 'x', which mutates_args does not name"):
        torch_neuronx.nki_op("stand_in::hidden", mutates_args={})(add_one)(x)
    assert torch.equal(torch_neuronx.nki_op("stand_in::declared", mutates_args={"x"})(add_one)(x).cpu(), torch.full((3,), 2.0))
    with pytest.raises(TypeError, match="tensor on cpu"):
        nki.jit(add_one)(torch.zeros(3))


def test_check_runs_on_the_device() -> None:
    """`kdk check --target trn2` where a Trainium2 is: on it, as measured, and not simulated."""
    row = Row("rms_norm", "forward", "nki", "trn2", "float32")
    found = run_row(row, place("nki", "trn2"))
    assert local_targets() == {"trn2": "neuron:0"}
    assert {r.evidence for r in found} == {"measured"}
    assert {r.outcome for r in found} <= {"passed", "refused"} and any(r.outcome == "passed" for r in found), found
    assert {c.how for c in nki.CALLS} == {"device"}
