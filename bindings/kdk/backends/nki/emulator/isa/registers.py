"""Virtual registers, and what the instructions tell about the core."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import access
from ..core import current, generation
from ..dtypes import is_integer
from ..errors import need
from ..lnc import check_access
from ..memory import PSUM, WRITTEN
from ..objects import VirtualRegister
from ..tensor import NkiTensor
from .enums import nc_version


def get_nc_version() -> nc_version:
    """The generation of the target."""
    return nc_version(generation())


def get_nc_sub_version() -> int:
    """The silicon revision; the emulator models the first."""
    return 0


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A new register, with a constant or without a value."""
    if x is not None and (isinstance(x, bool) or not isinstance(x, (int, np.integer))):
        raise TypeError(f"register_alloc({x!r}): an int or None")
    return VirtualRegister(None if x is None else _wrap(int(x)))


def _wrap(value: int) -> int:
    """Registers have 32 bits."""
    need(-(1 << 31) <= value < 1 << 32, "argument", f"{value} does not fit a 32-bit register")
    return value


def _register(x: Any, what: str) -> VirtualRegister:
    if not isinstance(x, VirtualRegister):
        raise TypeError(f"{what} must be a register from register_alloc, not {x!r}")
    return x


def register_move(dst: VirtualRegister, src: Any) -> None:
    """dst = a constant or another register."""
    dst = _register(dst, "register_move: dst")
    need(not dst.frozen, "loop", "register_move into the register of fori_loop, which is read-only")
    dst.value = src.read("src of register_move") if isinstance(src, VirtualRegister) else _wrap(int(src))


def register_load(dst: VirtualRegister, src: NkiTensor) -> None:
    """dst = the one element of a tensor in HBM or SBUF."""
    dst = _register(dst, "register_load: dst")
    need(not dst.frozen, "loop", "register_load into the register of fori_loop, which is read-only")
    need(src.buffer is not PSUM, "memory", f"register_load from {src}; it must be in SBUF or HBM")
    need(src.size == 1, "shape", f"register_load from {src}, must have one element")
    access.touch(src)
    check_access(current(), (), (src,))
    access.check_usable(src, "a register from")
    dst.value = int(access.array(src).reshape(-1)[0]) if current().data else None


def register_store(dst: NkiTensor, src: VirtualRegister) -> None:
    """The one element of a tensor in HBM or SBUF = src."""
    value = _register(src, "register_store: src").read("src of register_store")
    need(dst.buffer is not PSUM, "memory", f"register_store to {dst}; it must be in SBUF or HBM")
    need(dst.size == 1, "shape", f"register_store to {dst}, must have one element")
    need(is_integer(dst.dtype), "dtype", f"register_store to {dst}, must be an integer")
    access.touch(dst)
    check_access(current(), (dst,), ())
    if value is not None:
        access.array(dst)[...] = np.asarray(value).astype(access.array(dst).dtype)
    access.mark(dst, True, WRITTEN)
