"""Where a check runs an implementation: on a device that is here, or simulated on the CPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdk.backends import LANGUAGES
from kdk.errors import UsageError
from kdk.platforms import platform


@dataclass(frozen=True)
class Place:
    """impl: the choice passed to the operator, strict. device: of the tensors. evidence: what a result from here is worth."""

    impl: str
    device: str
    evidence: str

    @property
    def moved(self) -> bool:
        return self.device != "cpu"

    def move(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments on the device, with their strides."""
        if not self.moved:
            return args
        return tuple([_to(a, self.device) if isinstance(a, Tensor) else a for a in args])


MUCH = 1 << 30  # bytes behind a view whose elements lie far apart


def _to(t: Tensor, device: str) -> Tensor:
    """A copy; on CUDA with the same strides and offset, neighbours in its storage included; of a view that lies far apart, without.

    Elsewhere the back end has the say: XLA's tensors have neither strides nor a storage.
    """
    if not device.startswith("cuda"):
        return t.to(device)
    if t.untyped_storage().nbytes() > MUCH:
        wide = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
        return wide.copy_(t)
    storage = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).to(device)
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


def _devices() -> list[torch.device]:
    """The accelerators of this machine as torch has them; PyTorch/XLA's where its user has imported it."""
    found = []
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        found += [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]
    if "torch_xla" in sys.modules:
        found.append(torch.device("xla", 0))
    return found


def local_targets() -> dict[str, str]:
    """Chips that are in this machine and that a kernel language is native to, and the torch device that each is."""
    found: dict[str, str] = {}
    for device in _devices():
        for language in LANGUAGES.values():
            if platform(device.type) not in language.platforms or language.module("launch").missing(platform(device.type)):
                continue
            chip = language.module("launch").target(device)
            if chip:
                found.setdefault(chip, str(device))
    return found


def place(implementation: str, target: str) -> Place:
    """Where to run `implementation` for `target`: on that chip if it is here, else in the language's simulator."""
    if implementation not in LANGUAGES:
        device = local_targets().get(target, "cpu")
        if target != "cpu" and device == "cpu":
            raise UsageError("KDK-TARGET", f"{implementation} runs on the cpu or a device that is here", value=target)
        return Place(f"{implementation}!", device, "measured")
    device = local_targets().get(target, "")
    if device:
        return Place(f"{implementation}!", device, "measured")
    return Place(f"{implementation}@{target}!", "cpu", "simulated")


def benched(name: str) -> tuple[torch.device, str]:
    """The torch device to time on and its chip: the named one, else the first accelerator, else the CPU."""
    chips = {device: chip for chip, device in local_targets().items()}
    if name == "cpu" or (not name and not chips):
        return torch.device("cpu"), "cpu"
    matching = [device for device in chips if not name or device == name or device.partition(":")[0] == name]
    if not matching:
        limit = ", ".join(["cpu", *chips])
        raise UsageError("KDK-DEVICE", "no such device here", value=repr(name), limit=limit, way_out="without it: kdk compile")
    return torch.device(matching[0]), chips[matching[0]]
