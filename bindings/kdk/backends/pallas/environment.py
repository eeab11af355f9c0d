"""What jax and libtpu need to know before they load on a host without a TPU."""

from __future__ import annotations

import os
import sys

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
