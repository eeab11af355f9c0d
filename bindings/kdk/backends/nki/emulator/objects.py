"""The small objects around tensors: NKIObject, the virtual register, and the ways to address at run time."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, dataclass
from typing import Any, NoReturn

from .core import running
from .errors import build_error, need


class _KernelClass(type):
    """The parser front end writes __init__ itself where a class has none, "compiled in the same way" with and without
    @dataclass: each field is an argument that may be left out, its default what the class body assigns, or None.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        core = running()
        if core is None or core.frontend != "parser" or not _lacks_init(cls):
            return super().__call__(*args, **kwargs)
        annotated = [name for base in reversed(cls.__mro__) for name in inspect.get_annotations(base)]
        values = dict.fromkeys(annotated) | _assigned(cls, annotated)
        given = dict(zip(annotated, args)) | kwargs
        unknown = [name for name in given if name not in values]
        if unknown or len(args) > len(annotated):
            raise TypeError(f"{cls.__name__}() has the fields {list(values)}, not {unknown or args[len(annotated) :]}")
        made: Any = object.__new__(cls)  # type: ignore[arg-type]
        made.__dict__.update(values | given)
        getattr(made, "__post_init__", lambda: None)()
        return made


def _lacks_init(cls: Any) -> bool:
    """Whether __init__ is the base class's, or what @dataclass generated from a string."""
    return cls.__init__ is NKIObject.__init__ or ("__dataclass_fields__" in vars(cls) and cls.__init__.__code__.co_filename == "<string>")


def _assigned(cls: type, annotated: list[str]) -> dict[str, Any]:
    """What the bodies of a class and its bases assign to fields, annotated or not; a default_factory is called."""
    methods = (staticmethod, classmethod, property)
    values: dict[str, Any] = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(NKIObject)]):
        for name, value in vars(base).items():
            if name in annotated or not (name.startswith("__") or callable(value) or isinstance(value, methods)):
                values[name] = value
        for name, declared in vars(base).get("__dataclass_fields__", {}).items():
            if declared.default_factory is not MISSING:
                values[name] = declared.default_factory()
    return values


class NKIObject(metaclass=_KernelClass):
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
