"""Pallas kernels through TorchTPU, as far as a host without a TPU can show it: `make test-tpu`.

A process has one chip, which kernels ask for while they are traced: the environment variable CHIP says which.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kdk.backends.pallas import launch
from kdk.backends.pallas.environment import prepare_jax

prepare_jax()
pytest.importorskip("torch_tpu", reason="it renames PrivateUse1 and wants a process of its own: make test-tpu")
from tests.pallas.described import KERNELS, call, direct  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch_tpu import _loader  # noqa: E402

import kdk.ops  # noqa: E402
from kdk.backends.pallas.compile import loaded  # noqa: E402
from kdk.errors import RefusedError  # noqa: E402
from kdk.registry import OPERATORS  # noqa: E402
from kdk_bench.modelled.torchtpu import as_if_there_were, stablehlo  # noqa: E402

CHIP = os.environ.get("CHIP", "v6e")
_loader._init_device("tpu")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def tpu() -> Iterator[None]:
    with as_if_there_were(CHIP):
        yield


def results(value: Any) -> list[torch.Tensor]:
    return [t for t in (value if isinstance(value, tuple) else (value,)) if t is not None and t.numel()]


@pytest.mark.parametrize("name, direction", KERNELS)
def test_registration_and_fake_tensors(name: str, direction: str, tpu: None) -> None:
    function, args = call(name, direction, "model")
    operator = launch.operator(function)
    assert operator is launch.operator(function), "registered once"
    with FakeTensorMode():
        fakes = [torch.empty(a.shape, dtype=a.dtype, device="tpu") if isinstance(a, torch.Tensor) else a for a in args]
        got = results(operator(*fakes))
    expected = results(OPERATORS[name].op.function(direction)(*direct(name, direction, "model")))  # type: ignore[misc]
    assert [(t.shape, t.dtype, t.device.type) for t in got] == [(t.shape, t.dtype, "tpu") for t in expected]


@pytest.mark.parametrize("name, direction", KERNELS)
def test_a_program_with_the_operator_compiles(name: str, direction: str, tpu: None) -> None:
    """torch operators before and after kdk's, in one executable; kdk's operator chose its Pallas kernel by itself."""
    operator = getattr(OPERATORS[name], direction)
    args = direct(name, direction, "model")

    def program(*values: Any) -> Any:
        values = tuple([v * 2 if isinstance(v, torch.Tensor) else v for v in values])
        with kdk.record() as record:
            out = operator(*values)
        assert [(key.implementation, key.how, key.target) for key in record.rows] == [("pallas", "device", CHIP)]
        return tuple([t + 1 for t in results(out)])

    text = stablehlo(program, args)
    assert text.count("call @kernel_0(") == 1 and "tpu_custom_call" in text and "stablehlo.multiply" in text
    loaded(text, CHIP)


@pytest.mark.parametrize("needs", ["x", "weight"])
def test_a_gradient_that_is_not_needed_is_none(needs: str, tpu: None) -> None:
    _, args = call("rms_norm", "backward", "odd")
    shapes = []

    def program(*values: Any) -> Any:
        out = OPERATORS["rms_norm"].backward(*values[:-1], needs, impl="!")
        shapes.extend(tuple(t.shape) for t in out)
        return results(out)[0] + 1

    stablehlo(program, args)
    x, weight = tuple(args[1].shape), tuple(args[2].shape)
    assert shapes == ([x, (0,)] if needs == "x" else [(0,), weight])


def test_without_a_tpu_the_refusal_says_so() -> None:
    assert launch.missing("tpu") == "TorchTPU finds no TPU on this host"
    _, args = call("silu_and_mul", "forward", "odd")

    def program(*values: Any) -> Any:
        return OPERATORS["silu_and_mul"].forward(*values, impl="pallas@v6e!")

    with pytest.raises(RefusedError, match="TorchTPU finds no TPU on this host"):
        stablehlo(program, args)


def test_the_chip_has_the_name_that_targets_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, chip in (("TPU v6e", "v6e"), ("TPU v7", "tpu7x"), ("TPU v4", "TPU v4")):
        monkeypatch.setattr(torch.tpu, "get_device_name", lambda name=name: name, raising=False)
        assert launch.target.__wrapped__(torch.device("tpu")) == chip
