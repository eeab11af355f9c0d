"""Between host arrays (NumPy, torch) and tensors in HBM. torch is only looked up, never imported."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import access
from .dtypes import ITEMSIZE, NUMPY, dtype_name
from .errors import refuse
from .memory import WRITTEN, Memory, MemoryRegion, Storage
from .tensor import NkiTensor


@dataclass(frozen=True)
class TensorSpec:
    """A shape and an NKI dtype without data: argument and result of a simulation without data."""

    shape: tuple[int, ...]
    dtype: str


def torch_of(x: Any) -> Any:
    """The torch module if x is a torch tensor, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def is_array(x: Any) -> bool:
    return isinstance(x, (np.ndarray, TensorSpec)) or torch_of(x) is not None


def _dtype_of(x: Any) -> str:
    if torch_of(x) is not None:
        name = str(x.dtype).removeprefix("torch.")
        return dtype_name({"float8_e4m3fn": "float8_e4m3fn", "bool": "bool_"}.get(name, name))
    return dtype_name(x.dtype)


def to_numpy(x: Any) -> np.ndarray:
    """A contiguous array, sharing memory where the host array allows it."""
    torch = torch_of(x)
    if torch is None:
        array = np.ascontiguousarray(x).reshape(x.shape)
        return array.view(np.uint8) if array.dtype == np.bool_ else array
    if x.device.type != "cpu":
        raise ValueError(f"argument on {x.device}: the simulator takes CPU tensors")
    tensor = x.detach().contiguous()
    name = _dtype_of(x)
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8).numpy()
    if NUMPY[name].kind == "V" or name.startswith(("bfloat", "float8")):
        bits = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
        return tensor.view(bits).numpy().view(NUMPY[name])
    return tensor.numpy()


def from_numpy(array: np.ndarray, dtype: str, torch: Any) -> Any:
    """An array as the kind of tensor that the caller uses."""
    if torch is None:
        return array.view(np.bool_) if dtype == "bool_" else array
    if dtype == "bool_":
        return torch.from_numpy(array).view(torch.bool)
    if dtype.startswith(("bfloat", "float8")):
        target = getattr(torch, dtype, None)
        if target is None:
            refuse("dtype", f"torch has no {dtype} to return")
        return torch.from_numpy(array.view({1: np.uint8, 2: np.int16}[array.itemsize])).view(target)
    return torch.from_numpy(array)


class Argument:
    """A host array as a tensor in HBM. Shares its bytes if it can; what the kernel wrote is copied back otherwise."""

    def __init__(self, given: Any, name: str, data: bool, region: MemoryRegion) -> None:
        self.given, self.torch = given, torch_of(given)
        self.dtype = _dtype_of(given)
        self.shape = tuple(int(n) for n in given.shape)
        if 0 in self.shape:
            refuse("argument", f"argument {name} of shape {self.shape} is empty")
        size = ITEMSIZE[self.dtype]
        if data:
            if isinstance(given, TensorSpec):
                raise TypeError(f"argument {name}: a TensorSpec needs simulate(..., data=False)")
            self.host = to_numpy(given)
            if not self.host.flags.writeable:
                self.host = self.host.copy()
            memory = Memory(self.host.nbytes, size, buffer=self.host.reshape(-1).view(np.uint8), state=WRITTEN)
        else:
            memory = Memory(math.prod(self.shape) * size, size, data=False, state=WRITTEN, tracked=False)
        self.region = region
        self.storage = Storage(region, self.shape or (1,), self.dtype, name, memory)
        self.storage.argument = True
        self.data = data

    def tensor(self) -> NkiTensor:
        return NkiTensor(self.shape, self.dtype, self.storage, self.region, self.storage.name)

    def write_back(self) -> None:
        if not self.data or not self.storage.written:
            return
        if self.torch is not None:
            if self.host.__array_interface__["data"][0] != self.given.data_ptr():
                with self.torch.no_grad():
                    self.given.copy_(from_numpy(self.host, self.dtype, self.torch).reshape(self.given.shape))
        elif not np.shares_memory(self.host, self.given):
            self.given[...] = self.host.view(self.given.dtype)


def result(t: NkiTensor, arguments: dict[int, Argument], torch: Any, data: bool) -> Any:
    """What the caller gets for a returned tensor: an argument itself, or a new array."""
    argument = arguments.get(id(t.storage))
    if argument is not None and t.shape == argument.shape and t.is_contiguous() and t.dtype == argument.dtype:
        argument.write_back()
        return argument.given
    if not data:
        return TensorSpec(t.shape, t.dtype)
    array = access.array(t)
    whole = argument is None and t.is_contiguous() and t.size == math.prod(t.storage.shape)
    return from_numpy(array if whole else array.copy(), t.dtype, torch)
