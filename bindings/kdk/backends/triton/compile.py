"""Triton kernels compiled ahead of time for GPUs that are not here.

The launcher itself runs, on tensors without data, and what it launches is compiled: its grid, its constants, its number of warps,
and its arguments' alignment. Nothing of that is said a second time.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from kdk.backends import Compiled, one_line

from . import absent, interpreter
from .chips import CHIPS
from .launching import bind, grid_of
from .resources import exceeded, resources

BRIEF = "registers, bits of the widest load, occupancy; tc: tensor cores"


def brief(resources: Mapping[str, Any]) -> str:
    """The resources of `compile_for` in a few characters."""
    cores = " tc" if resources["tensor_core_instructions"] else ""
    return f"{resources['registers']}r {resources['widest_load_bits']}b {resources['occupancy']:.0%}{cores}"


@functools.cache
def missing() -> str | None:
    """Why nothing can be compiled here, and how to get what lacks."""
    from kdk.backends.triton.launch import missing

    return missing("cuda")


class _Refused(Exception):
    """The compiler does not take a kernel."""


def compile_for(function: Callable[..., Any], args: tuple[Any, ...], target: str) -> Compiled:
    """Compile everything that `function(*args)` launches on a chip.

    args: what the launcher gets. Of tensors only shapes, strides, offsets and dtypes are read, so meta tensors do.
    """
    launches: dict[str, dict[str, Any]] = {}
    moved = 0

    def compile_launch(original: Any, kernel: Any, args: Any, kwargs: Any, grid: Any) -> Any:
        nonlocal moved
        bound, _ = bind(opened, kernel, args, kwargs)
        moved += _array_bytes(bound.values())
        sizes = grid_of(kernel, grid(dict(bound)) if callable(grid) else grid)
        with _diagnostics() as said:
            try:
                compiled = original(kernel, *args, grid=grid, warmup=True, **kwargs)
            except Exception as error:
                raise _Refused(_reason(kernel.__name__, error, said())) from error
        key = f"{compiled.hash} {sizes}"
        if key not in launches:
            launches[key] = resources(compiled, target, sizes)
        return compiled

    try:
        with interpreter.session(target, False, compile_launch) as opened, absent.device(target):
            opened.driver = absent.CompilingDriver(opened.target, CHIPS[target])
            function(*[absent.on_meta(a) for a in args])
    except _Refused as refused:
        return Compiled(target, "refused", str(refused))
    except Exception as error:
        return Compiled(target, "failed", f"{type(error).__name__}: {one_line(error)}")
    found = list(launches.values())
    over = tuple([text for launch in found for text in exceeded(launch, target)])
    if not found:
        return Compiled(target, "failed", "nothing was launched")
    return Compiled(target, "compiled", "", {**summary(found), "array_bytes": moved}, over)


def _array_bytes(values: Iterable[Any]) -> int:
    """Of the arrays that a launch is given, each once; an expanded dimension counts once."""
    arrays = [value if isinstance(value, Tensor) else getattr(value, "base", None) for value in values]  # a descriptor has a base
    unique = {id(t): t for t in arrays if isinstance(t, Tensor)}
    return sum(t.itemsize * math.prod(n for n, step in zip(t.shape, t.stride()) if step or not n) for t in unique.values())


def summary(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the launches: the worst of what is limited, the best of what is wished for; and each launch."""
    lightest = min(launches, key=lambda launch: launch["occupancy"])
    return {
        "registers": max(launch["registers"] for launch in launches),
        "spills": sum(launch["spills"] for launch in launches),
        "shared_bytes": max(launch["shared_bytes"] for launch in launches),
        "shared_limit": launches[0]["shared_limit"],
        "occupancy": lightest["occupancy"],
        "occupancy_limit": lightest["occupancy_limit"],
        "widest_load_bits": min(launch["widest_load_bits"] for launch in launches),
        "tensor_core_instructions": sum(launch["tensor_core_instructions"] for launch in launches),
        "launches": launches,
    }


@contextlib.contextmanager
def _diagnostics() -> Iterator[Callable[[], str]]:
    """What the compiler's passes print on the process's standard error, which is the only place where they say why."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)

        def said() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield said
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _reason(kernel: str, error: BaseException, said: str) -> str:
    """In one line: the kernel, the line, and what is wrong with it; without the excerpt of the source and the stack."""
    text = str(error)
    while error.__cause__ is not None and type(error.__cause__).__name__ != "_Refused":
        error = error.__cause__
        text = str(error) or text
    place = re.match(r"at (\d+):\d+:\n", text)
    if place:
        kernel = f"{kernel}, line {place[1]}"
        text = text.rpartition("^\n")[2] or text
    printed = re.findall(r"error: (.*)", said)
    if printed and ("PassManager" in text or not text):
        text = printed[0]
    return one_line(f"{kernel}: {text or type(error).__name__}")
