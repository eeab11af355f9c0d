"""Which platform a tensor lives on: its device type, the name PrivateUse1 was given, or the PJRT runtime behind xla."""

from __future__ import annotations

import functools
import os


@functools.cache
def platform(device_type: str) -> str:
    """cpu, cuda, tpu, neuron (PrivateUse1 renamed), xla:tpu, xla:neuron, xla:cpu ..., from `tensor.device.type`."""
    if device_type != "xla":
        return device_type
    runtime = os.environ.get("PJRT_DEVICE", "").lower()
    return f"xla:{runtime or 'cpu'}"
