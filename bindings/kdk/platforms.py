"""Which platform a tensor lives on: its device type, the name PrivateUse1 was given, or the PJRT runtime behind xla."""

from __future__ import annotations

import importlib
import os
import sys


def platform(device_type: str) -> str:
    """cpu, cuda, tpu, neuron (PrivateUse1 renamed), xla:tpu, xla:neuron, xla:unknown ..., from `tensor.device.type`."""
    if device_type == "privateuseone":  # what a device calls itself that was made before the back end gave its name
        from torch._C import _get_privateuse1_backend_name

        return str(_get_privateuse1_backend_name())
    if device_type == "xla":
        return f"xla:{_pjrt_runtime()}"
    return device_type


def _pjrt_runtime() -> str:
    """tpu, neuron, cpu, cuda ... : what torch_xla says, which made the tensor; before it is imported, what it will be told."""
    said = None
    if "torch_xla" in sys.modules:
        said = importlib.import_module("torch_xla.runtime").device_type()
    return (said or os.environ.get("PJRT_DEVICE") or "unknown").lower()
