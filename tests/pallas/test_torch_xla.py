"""What can be said of PyTorch/XLA without it. tests/xla run with it."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from kdk.backends.pallas import launch, torch_xla


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    launch.missing.cache_clear()
    launch.target.cache_clear()
    torch_xla.missing.cache_clear()
    torch_xla.target.cache_clear()


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(torch_xla, "_installed", lambda package: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flax" else find(name))
    for where in ("xla:tpu", "xla:cpu"):
        assert "pip install torchax" in launch.missing(where)
    assert launch.missing("cpu") is None
    torch_xla.missing.cache_clear()
    monkeypatch.setattr(torch_xla, "_installed", lambda package: True)
    assert torch_xla.missing() is None


@pytest.mark.parametrize(
    ("accelerator", "chip"),
    [("v5litepod-8", "v5e"), ("v6e-1", "v6e"), ("v5p-128", "v5p"), ("v4-8", "v4"), ("tpu7x-8", "tpu7x"), (None, "")],
)
def test_the_chip(accelerator: str | None, chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def environment() -> dict[str, Any]:
        if accelerator is None:
            raise OSError("no metadata server")
        return {"ACCELERATOR_TYPE": accelerator}

    internal, tpu = ModuleType("torch_xla._internal"), ModuleType("torch_xla._internal.tpu")
    tpu.get_tpu_env = environment  # type: ignore[attr-defined]
    internal.tpu = tpu  # type: ignore[attr-defined]
    for module in (ModuleType("torch_xla"), internal, tpu):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert launch.target(torch.device("xla", 0)) == chip
