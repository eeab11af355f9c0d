"""From a view to the bytes and states behind it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .core import current
from .dtypes import NUMPY
from .errors import NkiValidationError, build_error, call_site, refuse
from .memory import MATMUL, POISON, PSUM, UNTOUCHED, WRITTEN
from .objects import VirtualRegister
from .tensor import NkiTensor, check_bounds

Usable = Any  # True, or a boolean array: which elements hold a value that may be used


def layout(t: NkiTensor) -> tuple[int, tuple[int, ...]]:
    """Start and strides of a view in bytes of its memory."""
    storage, size = t.storage, t.itemsize
    row, column = divmod(t.offset * size, storage.row)
    if not t.shape:
        return storage.base + column, ()
    first = t.strides[0] * size // storage.row * storage.pitch if t.on_chip else t.strides[0] * size
    return storage.base + row * storage.pitch + column, (first, *(s * size for s in t.strides[1:]))


def array(t: NkiTensor) -> np.ndarray:
    """The elements of a view, as a NumPy view of the storage."""
    start, strides = layout(t)
    return np.ndarray(t.shape, NUMPY[t.dtype], t.storage.memory.buffer, start, strides)  # type: ignore[arg-type]


def cells(t: NkiTensor) -> np.ndarray:
    """The states of the elements of a view; the last dimension counts the cells of one element."""
    memory = t.storage.memory
    flat = memory.cells(t.itemsize)
    unit = memory.unit
    start, strides = layout(t)
    shape = (*t.shape, t.itemsize // unit)
    return np.ndarray(shape, np.uint8, flat, start // unit, (*(s // unit for s in strides), 1))  # type: ignore[arg-type]


def covers_memory(t: NkiTensor) -> bool:
    whole = t.size * t.itemsize == t.storage.memory.nbytes
    return whole and all(s != 0 for s, n in zip(t.strides, t.shape) if n > 1)


def usable(t: NkiTensor) -> Usable:
    """True, or a boolean array in the shape of the view: which elements may be used."""
    memory = t.storage.memory
    if not memory.tracked:
        return True if (t.storage.written or t.storage.argument) and t.storage.poison is None else np.zeros(t.shape, bool)
    if isinstance(memory.state, int):
        return True if memory.state in (WRITTEN, MATMUL) else np.zeros(t.shape, bool)
    fine = ((cells(t) - np.uint8(1)) < 2).all(-1)
    if not fine.all():
        return fine
    if t.buffer is not PSUM and covers_memory(t):
        memory.state = WRITTEN
    return True


def last_writer(t: NkiTensor) -> np.ndarray:
    """UNTOUCHED, WRITTEN or MATMUL per element, as (partitions, elements) or (1, 1)."""
    memory = t.storage.memory
    if isinstance(memory.state, int):
        return np.full((1, 1), memory.state & 3, np.uint8)
    return (cells(t)[..., 0] & 3).reshape(t.partitions, -1)


def mark(t: NkiTensor, fine: Usable, writer: int, poison: tuple[str, str] | None = None) -> None:
    """Note that an instruction wrote the view; where not `fine`, what it wrote may not be used."""
    storage, memory = t.storage, t.storage.memory
    storage.written = True
    storage.elements_written += t.size
    if fine is not True:
        storage.poison = storage.poison or poison or ("uninitialised", call_site())
    if not memory.tracked:
        return
    if fine is True and covers_memory(t):
        memory.state = writer
    elif fine is True:
        if not (isinstance(memory.state, int) and memory.state == writer):
            cells(t)[...] = writer
    else:
        states = np.where(fine, writer, writer | POISON).astype(np.uint8)
        cells(t)[...] = np.broadcast_to(states.reshape(t.shape) if states.size == t.size else states, t.shape)[..., None]


def open_tile(t: NkiTensor) -> None:
    """A tile at a given address starts uninitialised when it is first used, whatever lived there before."""
    storage, place = t.storage, t.storage.placement
    if place.manual and place.first is None:
        place.first = len(current().trace)
        cells(NkiTensor(storage.shape, storage.dtype, storage, t.buffer))[...] = UNTOUCHED


def check_usable(t: NkiTensor, what: str) -> None:
    """Refuse if any element of a view that decides something (an index, a register) may not be used."""
    if usable(t) is not True:
        raise poisoned(t, f"{what} {t} holds data that nothing wrote or that came from such data")


def poisoned(t: NkiTensor, text: str) -> NkiValidationError:
    check, site = t.storage.poison or ("uninitialised", "")
    return build_error(check, text + (f"; it became unusable at {site}" if site else ""))


def resolve(t: NkiTensor, skip: bool = False) -> NkiTensor | None:
    """The view with a scalar run-time offset applied; None if that is out of bounds and may be skipped."""
    if t.dynamic is None or t.dynamic.kind == "vector":
        return t
    index = t.dynamic.index
    if isinstance(index, VirtualRegister):
        value = index.read("the offset")
    else:
        touch(index)
        check_usable(index, "the offset")
        value = int(array(index).reshape(-1)[0]) if current().data else None
    offset = t.offset + (value or 0) * t.dynamic.scale // t.itemsize
    view = t._view(t.shape, t.strides, offset, dynamic=None)
    if value is None:  # without data the address is unknown; the pattern itself was checked
        return view._view(view.shape, view.strides, t.offset)
    try:
        return check_bounds(view)
    except NkiValidationError:
        if skip:
            return None
        raise


def gather_addresses(t: NkiTensor, skip: bool) -> tuple[np.ndarray, np.ndarray]:
    """Element addresses (partitions, elements) of a view with one index per partition, and which are in bounds."""
    index, scale = t.dynamic.index, t.dynamic.scale  # type: ignore[union-attr]
    touch(index)
    check_usable(index, "the index")
    rows = array(index).astype(np.int64).T.reshape(-1)[: t.shape[0]]
    inner = np.zeros((1,), np.int64)
    for size, stride in zip(t.shape[1:], t.strides[1:]):
        inner = (inner[:, None] + np.arange(size) * stride).reshape(-1)
    addresses = t.offset + rows[:, None] * (scale // t.itemsize) + inner
    fine = ((addresses >= 0) & (addresses < t.storage.total // t.itemsize)).all(1)
    if not skip and not fine.all():
        refuse("bounds", f"index {rows[~fine][0]} into {t}: the storage has {t.storage.total // t.itemsize} elements")
    return addresses, np.asarray(fine)


def as_line(t: NkiTensor) -> NkiTensor:
    """The whole storage of an HBM view in one dimension."""
    return t._view((t.storage.total // t.itemsize,), (1,), 0, dynamic=None)


def touch(*tensors: NkiTensor) -> None:
    """Extend the life of the storages to the instruction being issued, and check that they are in scope."""
    core = current()
    now = len(core.trace)
    for t in tensors:
        storage = t.storage
        if storage.placement.first is None:
            storage.placement.first = now
        storage.placement.last = now
        if storage.loops and storage.loops != tuple(core.loops[: len(storage.loops)]):
            refuse("loop", f"{t} was created in the body of a dynamic loop that has ended")
