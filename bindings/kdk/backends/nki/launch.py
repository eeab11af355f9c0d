"""NKI kernels on Trainium, and `run`, through which a kernel's file calls its kernels everywhere.

On TorchNeuron ("neuron" tensors, PrivateUse1) the host function of an operator, `forward` or `backward`, becomes one operator
of torch_neuronx.nki_op: eager, the kernels inside it are compiled once per shapes, dtypes and values of the other arguments;
in a graph for torch.compile(backend="neuron") it is what the vendor's compiler knows how to take apart (`kdk.capture`). It
needs no gradient of its own: the kdk operator around it has one. On XLA-based torch-neuronx ("xla" tensors) the kernel is called
as it is, and torch_xla records it.

Followed as documented for torch_neuronx 2.14 (SDK 2.33); kdk has not run it on a device. The documentation does not say
* what nki_op makes of symbolic shapes: compile with dynamic=False;
* how a kernel takes tensors inside a tuple: pass each as an argument of its own;
* whether a kernel that returns a tuple of one tensor gives a tuple: `run` gives one in any case.
TorchNeuron computes what it does not support on the CPU. A kdk operator has a kernel of its own on every device and is never
taken there; what stands around the kernels, views, copies and sorted indices, may be: torch_neuronx.get_fallback_ops() tells.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OVERRIDE = "NEURON_PLATFORM_TARGET_OVERRIDE"  # the vendor's: trn2 or gen3, trn3 or gen4, trn1 or inf2 or gen2
TARGETS = {"trn2": "trn2", "gen3": "trn2", "trn3": "trn3", "gen4": "trn3"}
OLD = ("trn1", "inf2", "gen2")
PRODUCT = Path("/sys/devices/virtual/dmi/id/product_name")  # the type of an EC2 instance: trn2.48xlarge
HOW_TO_GET_IT = "it comes with the Neuron SDK, not from PyPI: see 'Install TorchNeuron' in the AWS Neuron documentation"


class _Local(threading.local):
    def __init__(self) -> None:
        self.runner: Callable[..., Any] | None = None


LOCAL = _Local()  # set by simulate.run_simulated for the calls inside it


def missing(where: str) -> str | None:
    """Why NKI kernels cannot be used on a platform ("cpu": in a simulator), and how to get what is missing."""
    from kdk.backends.nki import emulator

    if where == "cpu":
        if emulator.vendor_nki_available() or importlib.util.find_spec("ml_dtypes"):
            return None
        return "kdk's emulator of NKI needs ml_dtypes, which is not installed: pip install 'torch-kdk[neuron]'"
    if not emulator.vendor_nki_available():
        return f"the vendor's nki is not installed; {HOW_TO_GET_IT}"
    if where == "neuron":
        try:
            package = importlib.import_module("torch_neuronx")
        except ImportError as error:
            return f"torch_neuronx cannot be imported ({error}); {HOW_TO_GET_IT}"
        if not hasattr(package, "nki_op"):
            version = getattr(package, "__version__", "of unknown version")
            return f"torch_neuronx {version} has no nki_op: TorchNeuron 2.14 (Neuron SDK 2.33) or later is needed"
    chip = _chip()
    return f"NKI kernels need Trainium2 or Trainium3, this is {chip}" if chip.startswith(OLD) else None


def _chip() -> str:
    """What the vendor's override names, else the type of the instance; empty if neither says."""
    said = os.environ.get(OVERRIDE, "").strip().lower()
    if not said:
        try:
            said = PRODUCT.read_text().strip().lower()
        except OSError:
            return ""
    return TARGETS.get(said) or next((chip for chip in ("trn2", "trn3", *OLD) if said.startswith(chip)), "")


def prepare() -> None:
    """Make `import nki` work for a kernel's file: the vendor's package, or kdk's emulator in its place."""
    from kdk.backends.nki import emulator

    if not emulator.vendor_nki_available():
        emulator.install()


def target(device: torch.device) -> str:
    """trn2 or trn3; empty where nothing says which, and a kernel's `supports` then assumes the smaller one."""
    return _chip()


def run(kernel: Callable[..., Any], *args: Any) -> tuple[Tensor, ...]:
    """Call an `@nki.jit` kernel, with contiguous tensors: simulated on CPU tensors, launched as it is elsewhere.

    What it returns is always a tuple: for one result the toolchains may or may not give one.
    """
    args = tuple([a.contiguous() if isinstance(a, Tensor) else a for a in args])
    result = (LOCAL.runner or _call)(kernel, *args)
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _call(kernel: Callable[..., Any], *args: Any) -> Any:
    return kernel(*args)


def run_on_device(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a kernel's host function, on TorchNeuron as an operator of nki_op."""
    if any(isinstance(a, Tensor) and a.device.type == "xla" for a in args):
        return function(*args)
    return as_operator(function)(*args)


@functools.cache
def as_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """kdk_nki::<operator>_<direction>. Its schema comes from the annotations, resolved; a gradient that is None, from `no_nones`."""
    from torch_neuronx import nki_op

    from kdk.dispatch import no_nones
    from kdk.torch_library import resolved

    def host(*args: Any) -> Any:
        return no_nones(function(*args), args)

    like = resolved(function)
    host.__name__ = host.__qualname__ = f"{function.__module__.split('.')[-2]}_{function.__name__}"
    host.__annotations__ = like.__annotations__
    host.__signature__ = like.__signature__  # type: ignore[attr-defined]
    return nki_op(f"kdk_nki::{host.__name__}", mutates_args={})(host)  # type: ignore[no-any-return]
