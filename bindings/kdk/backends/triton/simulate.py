"""The simulator of Triton kernels: interpreted on CPU tensors, with exact number formats, checked for faults that a
GPU would hide."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .interpreter import session


@contextlib.contextmanager
def interpret(*, sanitize: bool = True, target: str = "sm_90") -> Iterator[None]:
    """Inside the block, every Triton launch of this thread is interpreted as `target` would run it.

    With `sanitize`, memory faults, races between programs and undefined lanes raise `sanitizer.KernelMemoryError` or
    reach the result as NaN.
    """
    with session(target, sanitize):
        yield


def run_simulated(function: Callable[..., Any], args: tuple[Any, ...], target: str) -> Any:
    """`function(*args)` with every Triton launch inside it interpreted on CPU tensors, repaired and sanitized."""
    with interpret(target=target):
        return function(*args)


def unique_bytes(function: Callable[..., Any], args: tuple[Any, ...], target: str) -> int:
    """What `function(*args)` reads and writes, interpreted on CPU tensors: of every launch each byte once, however often it is
    touched. An array between two launches counts in both."""
    with session(target, True) as opened:
        opened.touched = []
        function(*args)
        return sum(opened.touched)
