"""kdk on tensors of PyTorch/XLA, on the CPU: `make test-xla`, in an environment of its own with torch 2.9."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from tests.inputs import arguments, floating, results

import kdk
import kdk.ops
from kdk.errors import RefusedError
from kdk.platforms import platform
from kdk.registry import OPERATORS
from kdk_bench.check import Row, run_row
from kdk_bench.places import Place

torch_xla = pytest.importorskip("torch_xla", reason="torch_xla needs torch 2.9 and an environment of its own: make test-xla")
torch_xla.device()  # torch counts devices at the first backward, on whatever device: XLA's must be there by then

NAMES = dir(kdk.ops)
ROWS = [(name, direction) for name in NAMES for direction in ("forward", "backward") if OPERATORS[name].op.function(direction)]
PLACES = {"plain": Place("", "xla", "simulated"), "pallas": Place("pallas@v6e!", "xla", "simulated")}
# What the cases at the edges hold that no kernel on a TPU takes: 1026 heads; 819 channels of a group, which a block holds whole.
REFUSED = {
    ("rope", "forward"): {"one less than a tile, far columns"},
    ("rope", "backward"): {"one less than a tile, far columns"},
    ("group_norm_silu", "forward"): {"long reduction, huge values"},
}
# XLA's maximum passes over NaN on a CPU: the plain operator's scale is a number where the reference's is NaN.
WRONG = {name: {"infinities and NaN"} for name in ("rms_norm_dynamic_quant", "add_rms_norm_dynamic_quant")}


def on_xla(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments on the device; leaves where they are leaves."""
    return {k: a.detach().to("xla").requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for k, a in args.items()}


def gradients(name: str, args: dict[str, Any]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The outputs, and the gradients of the arguments that require one, for drawn gradients of the outputs."""
    outputs = results(OPERATORS[name].call(**args))
    leaves = [a for a in args.values() if isinstance(a, torch.Tensor) and a.requires_grad]
    if not leaves:
        return outputs, ()
    differentiable, generator = floating(outputs), torch.Generator().manual_seed(1)
    drawn = [torch.randn(y.shape, generator=generator).to(y.dtype).to(y.device) for y in differentiable]
    return outputs, torch.autograd.grad(differentiable, leaves, drawn)


def test_the_platform() -> None:
    assert platform(torch.ones(1, device="xla").device.type) == "xla:cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["", "pallas"], ids=["default", "pallas"])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(name: str, implementation: str, dtype: torch.dtype) -> None:
    """Through the public function and torch's autograd, against the reference on the CPU."""
    op = OPERATORS[name].op
    on_cpu = arguments(op, dtype, grad=True)
    expected, expected_gradients = gradients(name, on_cpu)
    strict = kdk.strict() if implementation else contextlib.nullcontext()  # by default an algorithm in plain torch may refuse
    with strict, kdk.record() as r, kdk.use(**({name: implementation} if implementation else {})):
        got, got_gradients = gradients(name, on_xla(on_cpu))
    own = {"pallas"} if implementation else {"torch", "reference"}
    how = "simulated" if implementation else "device"
    assert [(row.direction, row.how) for row in r.rows if row.how != "refused"] == [(direction, how) for n, direction in ROWS if n == name]
    assert {row.implementation for row in r.rows} <= own
    assert len(got_gradients) == len(op.uses)
    for g, e in zip([*got, *got_gradients], [*expected, *expected_gradients], strict=True):
        assert g.device.type == "xla"
        torch.testing.assert_close(g.cpu(), e)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", PLACES)
@pytest.mark.parametrize("name, direction", [row for row in ROWS if OPERATORS[row[0]].op.kind != "algorithmic"])
def test_the_check_holds(name: str, direction: str, implementation: str, dtype: str) -> None:
    """The edges of `kdk check --quick`, by its rule. Of algorithms XLA compiles every shape anew, for minutes and in gigabytes."""
    if implementation == "pallas" and dtype == "bfloat16":
        pytest.skip("XLA compiles jax's interpreter for every case, which takes minutes; float32 shows a wrong formula")
    found = run_row(Row(name, direction, implementation, "v6e", dtype), PLACES[implementation])
    refused = {r.case for r in found if r.outcome == "refused"}
    assert refused == (REFUSED.get((name, direction), set()) if implementation == "pallas" else set())
    assert len(found) > 10
    wrong = WRONG.get(name, set()) if implementation == "plain" else set()
    assert {r.case for r in found if r.outcome == "failed"} == wrong, [str(r) for r in found]


def test_a_wrong_kernel_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's file is what runs."""
    import kdk_kernels.silu_and_mul.pallas as kernel

    right = kernel.forward

    def wrong(*args: Any, interpret: Any) -> Any:
        return right(*args, interpret=interpret).at[..., -1].set(0)

    monkeypatch.setattr(kernel, "forward", wrong)
    found = run_row(Row("silu_and_mul", "forward", "pallas", "v6e", "float32"), PLACES["pallas"], case="plain")
    assert {r.outcome for r in found} == {"failed"}


def test_gradients_in_turn() -> None:
    """The results that a kernel leaves out differ from call to call, also when all of the calls have been compiled."""
    x, weight = torch.randn(4, 8), torch.randn(8)
    for needed in [("x",), ("weight",), ("x", "weight"), ("x",), ("weight",)]:
        given = {"x": x.clone().requires_grad_("x" in needed), "weight": weight.clone().requires_grad_("weight" in needed)}
        _, expected = gradients("rms_norm", {**given, "eps": 1e-5})
        with kdk.use("pallas"), kdk.strict():
            _, got = gradients("rms_norm", {**on_xla(given), "eps": 1e-5})
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g.cpu(), e)


@pytest.mark.parametrize("implementation", ["triton", "nki"])
def test_other_kernels_refuse(implementation: str) -> None:
    args = on_xla(arguments(OPERATORS["silu_and_mul"].op))
    with kdk.use(implementation), kdk.strict(), pytest.raises(RefusedError, match="it does not run on xla:cpu"):
        kdk.ops.silu_and_mul(**args)


def test_on_a_tpu_nothing_would_be_interpreted() -> None:
    """The launch for xla:tpu hands jax the kernel to compile, which jax does not do for a CPU."""
    from kdk.backends.pallas import launch
    from kdk_kernels.silu_and_mul import pallas

    assert launch.missing("xla:tpu") is None
    gate, up = torch.randn(2, 16, 128, device="xla")
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU backend"):
        launch.run_on_device(pallas.forward, (gate, up))
