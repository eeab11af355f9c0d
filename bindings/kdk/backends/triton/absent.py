"""A GPU that is not here, for host code that is to launch on it: tensors without data that say that they lie on it, and
answers to what a launcher asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .chips import CHIPS, Chip
from .driver import SimulatedDriver

DEVICE = torch.device("cuda", 0)
ALIGNED = 1 << 20  # what memory allocators give is aligned to more than a kernel is specialised for
_DEVICE, _IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class _OnDevice(TorchFunctionMode):
    """Inside, meta tensors are on "cuda:0", and what is made there is a meta tensor.

    Not torch's fake tensors: indexing one on a device that torch was built without raises.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE:
            found = func(*args)
            return DEVICE if found.type == "meta" else found
        if func == _IS_CUDA:
            return bool(args[0].is_meta)
        name = getattr(func, "__name__", "")
        if name == "data_ptr":
            return ALIGNED + args[0].storage_offset() * args[0].itemsize
        if name == "get_device":
            return 0
        if name == "cuda":
            return args[0]
        if func is torch.device:  # a name, which says nothing yet
            return func(*args, **(kwargs or {}))
        return func(*[_here(a) for a in args], **{k: _here(v) for k, v in (kwargs or {}).items()})


def _here(value: Any) -> Any:
    if isinstance(value, (torch.device, str)) and str(value).partition(":")[0] == "cuda":
        return torch.device("meta")
    return value


class CompilingDriver(SimulatedDriver):
    """Triton keeps what it compiled by device, so every target is a device of its own."""

    def __init__(self, target: Any, chip: Chip) -> None:
        super().__init__(target)
        self.chip = chip
        self.utils = SimpleNamespace(get_device_properties=lambda device: self.properties())

    def properties(self) -> dict[str, int]:
        """As Triton's own drivers give them."""
        chip = self.chip
        return {
            "max_shared_mem": chip.shared,
            "max_num_regs": chip.registers,
            "multiprocessor_count": chip.processors,
            "warpSize": chip.warp_size,
            "max_threads_per_sm": chip.warps * chip.warp_size,
        }

    def get_current_device(self) -> Any:
        return f"kdk {self.chip.name}"

    def get_device_capability(self, *_: Any) -> tuple[int, int]:
        return self.chip.capability

    def get_active_torch_device(self) -> torch.device:
        return DEVICE


def properties(chip: Chip) -> SimpleNamespace:
    """As torch gives them."""
    major, minor = chip.capability
    return SimpleNamespace(
        name=chip.part,
        major=major,
        minor=minor,
        total_memory=chip.memory,
        multi_processor_count=chip.processors,
        warp_size=chip.warp_size,
        max_threads_per_multi_processor=chip.warps * chip.warp_size,
        shared_memory_per_block_optin=chip.shared,
        shared_memory_per_multiprocessor=chip.shared_total,
        regs_per_multiprocessor=chip.registers,
        gcnArchName="" if chip.name.startswith("sm_") else chip.name,
    )


@contextlib.contextmanager
def device(target: str) -> Iterator[None]:
    """Inside, torch has one GPU, of this chip, on which nothing can be computed. For the whole process."""
    chip = CHIPS[target]
    answers: dict[str, Any] = {
        "get_device_properties": lambda *_: properties(chip),
        "get_device_capability": lambda *_: chip.capability,
        "get_device_name": lambda *_: chip.part,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "set_device": lambda *_: None,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
    }
    hip = None if target.startswith("sm_") else torch.version.hip or "0"
    with mock.patch.multiple(torch.cuda, **answers), mock.patch.object(torch.version, "hip", hip), _OnDevice():
        yield


def on_meta(value: Any) -> Any:
    """An argument without its data: the same shape, strides, offset and dtype."""
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    storage = torch.empty(value.untyped_storage().nbytes() // value.itemsize, dtype=value.dtype, device="meta")
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())
