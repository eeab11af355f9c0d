"""Interprets @triton.jit kernels on the CPU without TRITON_INTERPRET, so that one process interprets and compiles
the same kernel.

What is replaced, and for how long:

* While any context is open, four entry points of Triton (`JITFunction.run` and `__call__`, `Autotuner.run`,
  `ASTSource.make_ir`) and the active driver. All of them look at the calling thread first: one that entered no
  context gets Triton's own behaviour.
* During a launch, and only then, the functions of `triton.language`. Those are one set for the process, so a launch
  holds `_language`, and so does the compiler's front end (`make_ir`) in every thread. A compilation that another
  thread had begun before the first context was entered is the one thing that is not waited for.

Triton's interpreter module is used as a library; its own builder, semantic and functions are as before after every
launch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from kdk.errors import UsageError

from .driver import DriverOfThread, SimulatedDriver, once

# A notice about the default of compiled code, which would greet everyone who interprets or compiles a kernel.
warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION is unset")

_MISSING = object()
_language = threading.RLock()  # held while triton.language is replaced, and while Triton's front end reads it
_hooks = threading.Lock()  # guards _open and the entry points
_open = 0
_undo: list[Callable[[], None]] = []


class _Thread(threading.local):
    def __init__(self) -> None:
        self.sessions: list[Any] = []
        self.launching = False


_thread = _Thread()


Launch = Callable[..., Any]  # (original, kernel, args, kwargs, grid), original: `JITFunction.run` of Triton


class Session:
    """What is done with the launches of a thread: interpret them, or `instead`."""

    def __init__(self, target: str, sanitize: bool, instead: Launch | None) -> None:
        from triton.compiler import make_backend

        self.name, self.sanitize, self.instead = target, sanitize, instead
        self.touched: list[int] | None = None  # a list, with `sanitize`: gets of every launch the bytes at different addresses
        self.target = gpu_target(target)
        self.backend = make_backend(self.target)
        self.driver = SimulatedDriver(self.target)


def gpu_target(name: str) -> Any:
    """Triton's own object for a target such as "sm_90" or "gfx942"."""
    from triton.backends.compiler import GPUTarget

    if name.startswith("sm_") and name[3:].isdigit():
        return GPUTarget("cuda", int(name[3:]), 32)
    if name.startswith("gfx"):
        return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)
    raise UsageError("KDK-TARGET", "no target of Triton", value=repr(name), limit="sm_<number> or gfx<number>")


def current() -> Session | None:
    """The innermost session of this thread."""
    return _thread.sessions[-1] if _thread.sessions else None


@contextlib.contextmanager
def session(target: str, sanitize: bool, instead: Launch | None = None) -> Iterator[Session]:
    """Every launch of this thread inside the block is interpreted, or handed to `instead`. Contexts nest; the innermost one
    counts."""
    refuse_own_mode()
    opened = Session(target, sanitize, instead)
    _enter()
    _thread.sessions.append(opened)
    try:
        yield opened
    finally:
        _thread.sessions.remove(opened)
        _leave()


def refuse_own_mode() -> None:
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    if not isinstance(tl.sum, JITFunction):
        raise UsageError(
            "KDK-TRITON-INTERPRET",
            "TRITON_INTERPRET was set when triton was imported, which fixes its own interpreter for the whole process",
            way_out="unset TRITON_INTERPRET; kdk interprets kernels without it",
        )


def _enter() -> None:
    global _open
    with _hooks:
        if _open == 0:
            _install()
        _open += 1


def _leave() -> None:
    global _open
    with _hooks:
        _open -= 1
        if _open == 0:
            while _undo:
                _undo.pop()()


def _install() -> None:
    from triton.compiler import ASTSource
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    for owner, name, make in (
        (JITFunction, "run", _make_run),
        (JITFunction, "__call__", _make_call),
        (Autotuner, "run", _make_autotune),
        (ASTSource, "make_ir", _make_front_end),
    ):
        original = owner.__dict__.get(name, _MISSING)
        setattr(owner, name, functools.wraps(getattr(owner, name))(make(getattr(owner, name))))
        _undo.append(functools.partial(_put_back, owner, name, original))
    active = driver._active
    driver.set_active(DriverOfThread(lambda: getattr(current(), "driver", None), lambda: active or driver.default))
    _undo.append(functools.partial(setattr, driver, "_active", active))


def _put_back(owner: Any, name: str, original: Any) -> None:
    if original is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, original)


def _make_run(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        session = current()
        if session is None:
            return original(self, *args, grid=grid, warmup=warmup, **kwargs)
        if session.instead is not None:
            return session.instead(original, self, args, kwargs, grid)
        if warmup:  # compiles without running: there is nothing to compile
            return None
        from .launching import launch

        return launch(session, self, args, kwargs, grid)

    return run


def _make_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _thread.launching:
            return original(self, *args, **kwargs)
        from .launching import inline

        return inline(self, args, kwargs)

    return call


def _make_autotune(original: Callable[..., Any]) -> Callable[..., Any]:
    """Runs every configuration once, as tuning on a device does, then the first one. Nothing of it may outlive the
    call: a cached choice would be used on a device later, and timings on disk by other processes."""
    import copy

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return original(self, *args, **kwargs)
        twin = copy.copy(self)
        twin.cache, twin.cache_results = {}, False
        twin.__dict__["do_bench"] = once
        try:
            return original(twin, *args, **kwargs)
        finally:
            if hasattr(twin, "best_config"):  # host code may read it after the launch
                self.best_config = twin.best_config

    return run


def _make_front_end(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_ir(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _language:
            return original(self, *args, **kwargs)

    return make_ir


@contextlib.contextmanager
def replaced_language(semantic: Any) -> Iterator[None]:
    """The functions of triton.language act on NumPy arrays through `semantic`, for this thread; the other threads'
    compilers wait."""
    with _language:
        if _thread.launching:
            raise AssertionError("a kernel cannot launch a kernel")
        changes = _changes()
        _thread.launching, _active.semantic = True, semantic
        try:
            for owner, name, _, new in changes:
                setattr(owner, name, new)
            yield
        finally:
            for owner, name, old, _ in changes:
                _put_back(owner, name, old)
            _thread.launching, _active.semantic = False, None


class _Active:
    """Stands for the semantic of the launch that holds `_language`, in code that is made once."""

    semantic: Any = None

    def to_tensor(self, value: Any, check_type: bool = True) -> Any:
        return self.semantic.to_tensor(value, check_type)


_active = _Active()


def active_semantic() -> _Active:
    return _active


@functools.cache
def _changes() -> list[tuple[Any, str, Any, Any]]:
    """(owner, name, old, new) of everything that Triton's interpreter replaces, found by letting it do so once, and
    of our own replacements."""
    import triton.language as tl
    from triton.language.extra import libdevice as stubs
    from triton.runtime import interpreter as stock

    from . import builder, libdevice, reductions

    owners = [tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base, tl.dtype, stubs, stock]
    owners += [tl.condition] if hasattr(tl, "condition") else []
    before = [dict(vars(owner)) for owner in owners]
    scope, patch_attr = stock._LangPatchScope(), stock._patch_attr
    stock._patch_attr = _replace_builtin
    try:
        scope = stock._patch_lang(FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
        strangers = [owner for owner, *_ in scope._changes if owner not in owners]
        assert not strangers, f"triton's interpreter replaces attributes of {strangers}"
        own = {**builder.replacements(), **reductions.replacements(), **libdevice.replacements(_active)}
        after = [dict(vars(owner)) for owner in owners]
    finally:
        scope.restore()
        stock._patch_attr = patch_attr
        for owner, was in zip(owners, before):  # restore() leaves inherited attributes behind as the class's own
            for name in set(vars(owner)) - set(was):
                delattr(owner, name)
    changes = {}
    for owner, was, now in zip(owners, before, after):
        for name, new in now.items():
            if was.get(name, _MISSING) is not new and (owner, name) != (stock, "_patch_attr"):
                changes[owner, name] = (owner, name, was.get(name, _MISSING), new)
    for (owner, name), new in own.items():
        changes[owner, name] = (owner, name, vars(owner).get(name, _MISSING), new)
    return list(changes.values())


def _replace_builtin(owner: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
    @functools.wraps(member)
    def builtin(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = _active.semantic
        return member(*args, **kwargs)

    scope.set_attr(owner, name, builtin)
