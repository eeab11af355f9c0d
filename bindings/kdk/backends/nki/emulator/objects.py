"""The small objects around tensors: NKIObject, the virtual register, and the ways to address at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from .core import running
from .errors import build_error, need


class NKIObject:
    """Base class of kernel dataclasses and configuration objects."""

    def __init__(self, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


class VirtualRegister(NKIObject):
    """A 32-bit register of an engine. Its value exists on the device only, so Python may not look at it.

    `value` is for the emulator; None means that nothing was written, or that the simulation runs without data.
    """

    def __init__(self, state: int | None = None, frozen: bool = False) -> None:
        self.value = state
        self.frozen = frozen
        core = running()
        self.loops: tuple[int, ...] = tuple(core.loops) if core else ()

    def _no_value(self, *_: Any) -> NoReturn:
        error = build_error("loop", "a register was used in Python (if, while, int(), range() or arithmetic)")
        raise TypeError(str(error))

    __int__ = __index__ = __float__ = _no_value  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = __neg__ = _no_value
    __lt__ = __le__ = __gt__ = __ge__ = _no_value

    def __bool__(self) -> bool:
        core = running()
        if core is None or core.frontend != "parser":
            self._no_value()
        return self.read("the condition of while") != 0

    def read(self, what: str) -> int | None:
        """The value for an instruction; None only in a simulation without data."""
        core = running()
        if core is not None:
            need(
                self.loops == tuple(core.loops[: len(self.loops)]),
                "loop",
                f"{what} is a register of a loop that has ended",
            )
            if not core.data:
                return self.value
        need(self.value is not None, "uninitialised", f"{what} is a register that nothing was written to")
        return self.value


@dataclass(frozen=True)
class DynamicSlice:
    """What nl.ds(start, size) returns: a slice of known size."""

    start: int
    size: int


@dataclass(frozen=True)
class Dynamic:
    """A start address known at run time only: `index` times `scale` bytes, one for all or one per partition."""

    kind: str  # "scalar" or "vector"
    index: Any
    scale: int


@dataclass(frozen=True)
class Indirection:
    """Tensor indirection (gen4): columns of `base` at the offsets of an index tile, in snake order."""

    base: Any
    index: Any
    count: int
