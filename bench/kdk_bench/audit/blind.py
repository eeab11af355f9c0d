"""What goes past the dispatcher, and so past the recorder: looked for while the model runs, and named with its line.

Raw Triton launches, functions of compiled extensions, tensors handed to numpy or taken by their address, and memory that is read
though no operator wrote it, which is what all other kernels leave behind.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import mmap
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kdk_bench.audit.counting import has_storage, is_view

RAW = "a raw kernel launch"
EXTENSION = "a function of a compiled extension"
LEFT = "a tensor leaves torch"
THREAD = "another thread"
UNWRITTEN = "memory that no operator wrote"

LEAVES = {
    "numpy": "Tensor.numpy(): what follows runs on the host, in numpy",
    "__array__": "numpy takes the tensor: what follows runs on the host",
    "tolist": "Tensor.tolist(): the host waits for the device",
    "data_ptr": "Tensor.data_ptr(): whoever has the address reads and writes past torch",
    "__dlpack__": "Tensor.__dlpack__(): another library takes the memory",
}
"""torch functions that give a tensor to something else."""

Note = Callable[[str, str], Any]  # (what, which kind)


@contextlib.contextmanager
def launches(note: Note) -> Iterator[None]:
    """Names every raw Triton launch. It is left out, since the tensors are on the CPU, so that the audit sees what follows; a kernel
    for Triton's interpreter runs."""
    try:
        from triton.runtime.jit import KernelInterface
    except ImportError:
        yield
        return
    original = KernelInterface.__getitem__

    def launcher(kernel: Any, grid: Any) -> Callable[..., Any]:
        inner = kernel
        while hasattr(inner, "fn") and not inspect.isfunction(inner.fn):  # below autotuners and heuristics
            inner = inner.fn
        interpreted = type(inner).__name__ == "InterpretedFunction"
        name = getattr(inner.fn if hasattr(inner, "fn") else inner, "__name__", "")

        def launch(*args: Any, **kwargs: Any) -> Any:
            note(f"Triton kernel {name}" + ("" if interpreted else ", left out here: what it writes is not computed"), RAW)
            return original(kernel, grid)(*args, **kwargs) if interpreted else None

        return launch

    with mock.patch.object(KernelInterface, "__getitem__", launcher):
        yield


def extensions() -> set[str]:
    """The compiled modules of others in this process that are linked against torch."""
    found = set()
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__file__", "") or "")
        if name.partition(".")[0] not in ("torch", "functorch") and file.endswith((".so", ".pyd")) and _linked(file):
            found.add(name)
    return found


@functools.cache
def _linked(file: str) -> bool:
    """Whether a shared library asks for torch's. Of an ELF file its list of needed libraries is read, since they are large."""
    try:
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            needed = _needed(content) if content[:4] == b"\x7fELF" else [content[:]]
    except (OSError, ValueError, StopIteration, struct.error):
        return False
    return any(b"libc10" in name or b"libtorch" in name for name in needed)


def _needed(elf: mmap.mmap) -> list[bytes]:
    """The DT_NEEDED entries of a 64-bit ELF file."""
    start, (size, number) = struct.unpack_from("<Q", elf, 32)[0], struct.unpack_from("<HH", elf, 54)
    segments = [struct.unpack_from("<IIQQQQ", elf, start + i * size) for i in range(number)]  # type, flags, offset, address, _, bytes
    loaded = [(address, offset, length) for kind, _, offset, address, _, length in segments if kind == 1]
    entries: list[tuple[int, int]] = []
    for kind, _, offset, _, _, length in segments:
        if kind == 2:  # the dynamic section: pairs of a tag and a value
            entries = [struct.unpack_from("<QQ", elf, offset + at) for at in range(0, length, 16)]
    names = next(value for tag, value in entries if tag == 5)  # where the strings lie, as an address
    strings = next(offset + names - address for address, offset, length in loaded if address <= names < address + length)
    places = [strings + value for tag, value in entries if tag == 1]
    return [elf[place : elf.find(b"\0", place)] for place in places]


def watch(note: Note) -> Callable[[], None]:
    """Names every call of such a module's functions from Python until the returned function is called; costs nothing without any."""
    names = extensions()
    if not names:
        return lambda: None
    before = sys.getprofile()

    def heard(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__module__", None) in names:
            note(f"{function.__module__}.{function.__name__}", EXTENSION)

    sys.setprofile(heard)
    return lambda: sys.setprofile(before)


FRESH = frozenset("aten::" + name for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"))
COPIES = frozenset(("aten::_to_copy", "aten::clone"))


class Unwritten:
    """Follows memory from where it is asked for (`empty`) to the first operator that fills it, or reads it unfilled."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[StorageWeakRef, str, str]] = {}
        self.writes: dict[Any, tuple[tuple[int, str], ...]] = {}

    def see(self, func: Any, args: Any, kwargs: Any, inputs: Iterable[Any], outputs: Iterable[Any], line: str) -> tuple[str, str] | None:
        """(what, the line that asked for the memory) where this call reads memory that no call before it wrote."""
        name = func._schema.name
        read = None
        if self.storages:
            written = {id(t) for t in self._written(func, args, kwargs)}
            for tensor in inputs:
                key = tensor.untyped_storage()._cdata if has_storage(tensor) else None
                if key not in self.storages or (id(tensor) not in written and is_view(func)):
                    continue
                _, maker, where = self.storages[key]
                if id(tensor) in written:
                    del self.storages[key]
                elif name in COPIES:
                    self._add(outputs, maker, where)
                elif read is None:
                    del self.storages[key]
                    read = f"{maker} asks for it, {name} reads it: a kernel past torch writes it, or nothing does", where
        if name in FRESH:
            self._add(outputs, name, line)
        return read

    def _add(self, tensors: Iterable[Any], maker: str, line: str) -> None:
        # A weak reference keeps the number of a storage from being given out again.
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        for tensor in tensors:
            if has_storage(tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), maker, line)

    def _written(self, func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
        """The tensors that the operator's schema says it changes."""
        if func not in self.writes:
            arguments = enumerate(func._schema.arguments)
            self.writes[func] = tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
        for position, name in self.writes[func]:
            value = args[position] if position < len(args) else kwargs.get(name)
            yield from (t for t in (value if isinstance(value, list | tuple) else (value,)) if isinstance(t, torch.Tensor))
