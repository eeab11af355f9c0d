"""What jax and libtpu need to know before they load on a host without a TPU."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from kdk.backends.pallas import KINDS

# libtpu asks a cloud's metadata server what it runs on unless these are set; two processes may load it only if told so.
OFFLINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def has_tpu() -> bool:
    """Whether the host has a TPU's device files."""
    try:
        return any(name.startswith("accel") for name in os.listdir("/dev")) or bool(os.listdir("/dev/vfio"))
    except OSError:
        return False


def prepare_libtpu() -> None:
    """On a host without a TPU, before libtpu loads: no question to a network."""
    if not has_tpu():
        for name, value in OFFLINE.items():
            os.environ.setdefault(name, value)


def prepare_jax() -> None:
    """On a host without a TPU: keep jax on the CPU, unless the user or an earlier import decided otherwise."""
    prepare_libtpu()
    if not has_tpu() and "jax" not in sys.modules:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def on_chip(target: str) -> Any:
    """A context that tells code which asks for the chip while it is traced or lowered (pltpu.get_tpu_info) what it is for.

    A chip that kdk does not know: no context, and jax answers as it can.
    """
    import jax

    if target not in KINDS:
        return contextlib.nullcontext()
    chip = jax.sharding.AbstractDevice(KINDS[target], 1, "tpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=chip))
