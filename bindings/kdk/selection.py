"""Which implementation runs: the choice of a context, of the process, or the platform's own order. Imports no torch.

The choice travels as a string argument of the operator, so that backward, another thread, a checkpoint's recomputation, an
exported program and a DTensor's local shard all see the one that was in force at the call. Its grammar:

    ""  the platform's order        "triton"  that one first        "triton@sm_90"  on CPU tensors: simulated as that chip
    and a trailing "!"              strict: a refusal raises
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from kdk import registry
from kdk.backends import LANGUAGES, TARGETS
from kdk.errors import UsageError

IMPLEMENTATIONS = ("reference", "torch", *LANGUAGES)
EVERY, STRICT, OUTER = "*", "!", "^"  # keys of a choice beside the operators' names; OUTER: the choice around this one
_ALL = f"there are {', '.join(IMPLEMENTATIONS)}"


class Choice(NamedTuple):
    """A parsed choice. Empty strings: nobody chose."""

    implementation: str
    target: str
    strict: bool


def parse(text: str) -> Choice:
    """The choice that `text` stands for; raises UsageError for anything else."""
    strict = text.endswith("!")
    name, _, target = text.removesuffix("!").partition("@")
    if name and name not in IMPLEMENTATIONS:
        raise UsageError("KDK-IMPLEMENTATION", "unknown implementation", value=repr(name), limit=_ALL)
    if target and TARGETS.get(target) != name:
        of_name = LANGUAGES[name].targets if name in LANGUAGES else ()
        limit = f"{name or 'the default order'} has {', '.join(of_name) or 'no targets'}"
        raise UsageError("KDK-TARGET", f"unknown target of {name or 'the default'}", value=repr(target), limit=limit)
    return Choice(name, target, strict)


class _Local(threading.local):
    """Per thread. The attribute is set in __init__: dynamo reads a class attribute without a guard, which reuses wrong graphs."""

    def __init__(self) -> None:
        self.choice: dict[str, Any] = {}


LOCAL = _Local()
DEFAULT: dict[str, str] = {}


def current(name: str) -> str:
    """The choice in force for operator `name`. Traced by dynamo: plain look-ups only, each becomes a guard."""
    choice = LOCAL.choice
    if not choice and not DEFAULT:
        return ""
    impl = choice.get(name, choice.get(EVERY, DEFAULT.get(name, DEFAULT.get(EVERY, ""))))
    return impl + choice.get(STRICT, DEFAULT.get(STRICT, ""))


def _checked(everything: str | None, each: dict[str, str]) -> dict[str, str]:
    """A choice from what a user wrote. Traced by dynamo too: `with use(rms_norm="triton")` may stand in a compiled function."""
    new = dict(each)
    if everything is not None:
        new[EVERY] = everything
    for text in new.values():
        if not isinstance(text, str) or not text or text.endswith("!"):
            raise UsageError("KDK-IMPLEMENTATION", "unknown implementation", value=repr(text), limit=_ALL)
        parse(text)
    for name in each:
        if name not in registry.OPERATORS:
            registry.require([name])
    return new


class use:
    """Prefer an implementation: `with use("reference")` for all operators, `with use(rms_norm="triton")` for one.

    The implementation is a preference: where it refuses, the platform's order goes on (see `strict`). "reference" inlines
    plain torch, differentiable to any order. Works around and inside torch.compile(fullgraph=True); holds for the thread, as
    torch.no_grad does: an asyncio task that awaits inside shows its choice to the thread's other tasks.
    Raises UsageError for a name that does not exist.
    """

    def __init__(self, everything: str | None = None, /, **each: str) -> None:
        self.new = _checked(everything, each)

    def __enter__(self) -> None:
        old = LOCAL.choice
        if EVERY in self.new:
            kept = {STRICT: old[STRICT]} if STRICT in old else {}
        else:
            kept = old
        LOCAL.choice = {**kept, **self.new, OUTER: old}  # not in self: one object may be entered twice, or by two threads

    def __exit__(self, *exc: object) -> None:
        LOCAL.choice = LOCAL.choice[OUTER]


class simulate(use):
    """Run the kernels of a chip on CPU tensors, in its language's simulator: `with simulate("sm_90" | "v6e" | "trn2")`.

    What has no kernel, or refuses, runs on the reference, recorded with the reason. Raises UsageError for an unknown chip.
    """

    def __init__(self, target: str) -> None:
        if not isinstance(target, str) or target not in TARGETS:
            raise UsageError("KDK-TARGET", "unknown target", value=repr(target), limit=f"there are {', '.join(TARGETS)}")
        super().__init__(f"{TARGETS[target]}@{target}")


class strict:
    """Inside, a refusal raises RefusedError instead of moving on to the next implementation. KDK_STRICT=1: everywhere."""

    def __enter__(self) -> None:
        old = LOCAL.choice
        LOCAL.choice = {**old, STRICT: "!", OUTER: old}

    def __exit__(self, *exc: object) -> None:
        LOCAL.choice = LOCAL.choice[OUTER]


def set_default(everything: str | None = None, /, **each: str) -> None:
    """The process's preference, under every `use`. `set_default()` forgets it. Raises UsageError for an unknown name."""
    new = _checked(everything, each)
    kept = {STRICT: DEFAULT[STRICT]} if STRICT in DEFAULT else {}
    if not new or EVERY in new:
        DEFAULT.clear()
        DEFAULT.update(kept)
    DEFAULT.update(new)


def bind(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be run later under the choice in force now, whatever is in force then."""
    choice = LOCAL.choice
    outside = {STRICT: DEFAULT.get(STRICT, "")} if EVERY in choice else {EVERY: "", STRICT: "", **DEFAULT}
    now = {**outside, **choice}

    @functools.wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Any:
        old, LOCAL.choice = LOCAL.choice, now
        try:
            return function(*args, **kwargs)
        finally:
            LOCAL.choice = old

    return bound


def read_environment() -> None:
    """KDK_USE="triton" or KDK_USE="rms_norm=reference,rope=torch"; KDK_STRICT=1.

    Raises UsageError. The operators' names are not known yet: `kdk.ops` warns of those that are none.
    """
    for part in filter(None, os.environ.get("KDK_USE", "").split(",")):
        name, equals, value = part.rpartition("=")
        if equals and not name.strip():
            raise UsageError("KDK-USE", "KDK_USE", value=repr(part), limit="IMPLEMENTATION or OPERATOR=IMPLEMENTATION")
        DEFAULT[name.strip() or EVERY] = _checked(value.strip(), {})[EVERY]
    flag = os.environ.get("KDK_STRICT", "0")
    if flag not in ("", "0", "1"):
        raise UsageError("KDK-STRICT", "KDK_STRICT", value=repr(flag), limit="1 (strict) or 0")
    if flag == "1":
        DEFAULT[STRICT] = "!"


read_environment()
