"""From a device type to a platform: every branch, with stand-ins for torch_xla and for PrivateUse1's name."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from kdk.platforms import platform


def fake_torch_xla(monkeypatch: pytest.MonkeyPatch, device_type: str | None) -> None:
    runtime = ModuleType("torch_xla.runtime")
    runtime.device_type = lambda: device_type  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)


@pytest.fixture(autouse=True)
def no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)


@pytest.mark.parametrize("name", ["cpu", "cuda", "meta", "tpu", "neuron", "npu"])
def test_a_device_type_is_its_platform(name: str) -> None:
    """A renamed PrivateUse1 is known by its name: `tensor.device.type` tells it."""
    assert platform(name) == name


@pytest.mark.parametrize("name", ["tpu", "neuron"])
def test_private_use_1_is_known_by_the_name_it_was_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert platform("privateuseone") == "privateuseone"
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: name)
    assert platform("privateuseone") == name


@pytest.mark.parametrize(("runtime", "expected"), [("TPU", "xla:tpu"), ("NEURON", "xla:neuron"), ("CPU", "xla:cpu"), ("CUDA", "xla:cuda")])
def test_xla_is_what_the_runtime_says(runtime: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch_xla(monkeypatch, runtime)
    monkeypatch.setenv("PJRT_DEVICE", "OTHER")
    assert platform("xla") == expected


def test_xla_is_what_the_environment_says_where_the_runtime_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    assert platform("xla") == "xla:neuron"
    fake_torch_xla(monkeypatch, None)
    assert platform("xla") == "xla:neuron"
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert platform("xla") == "xla:tpu"


def test_xla_of_an_unknown_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    assert platform("xla") == "xla:unknown"
    fake_torch_xla(monkeypatch, None)
    assert platform("xla") == "xla:unknown"
