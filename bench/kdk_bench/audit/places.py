"""Where a call comes from: the module's path, the user's line, and for backward those of the forward call."""

from __future__ import annotations

import bisect
import functools
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

TORCH = str(Path(torch.__file__).parent)
HIDDEN = (TORCH, str(Path(__file__).parent), "<")
SPEAKERS = tuple(os.sep + name for name in ("warnings.py", "logging.py", os.path.join("logging", "__init__.py")))
"""What says something is not where it is said: the standard library's, and transformers' and diffusers' own."""

ENTRIES = (str(Path(__file__).parent / "running.py"), str(Path(__file__).parent / "chains.py"))
"""Whoever is called from here has no line of the user's."""

SLOW_NAME = re.compile(r"(^|_)(slow|naive|fallback)(_|$)|_(cpu|ref|reference)$|^torch_")
"""Functions that say by their name that they stand in for a faster one: slow_forward, rwkv_linear_attention_cpu, selective_scan_ref."""


class Places:
    """Follows modules through global hooks, and autograd's nodes through their sequence numbers."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.names: dict[int, str] = {}
        self.classes: dict[str, str] = {}
        self.roots: list[nn.Module] = []
        self.lines: dict[CodeType, str | None] = {}
        self.slow: Counter[CodeType] = Counter()
        self.sequence: list[int] = []
        self.forward: dict[int, tuple[str, str]] = {}

    def name(self, root: nn.Module) -> None:
        """The paths of a model's modules, from its root."""
        self.roots.append(root)
        for path, module in root.named_modules():
            self.names[id(module)] = path
            self.classes[path] = type(module).__name__

    @contextmanager
    def following(self) -> Iterator[None]:
        hooks = nn.modules.module
        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.stack.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self.names:
            self.name(module)
        self.stack.append(self.names[id(module)])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stack:
            self.stack.pop()

    def here(self) -> tuple[str, str, bool]:
        """(module path, file:line, whether autograd runs this) of the call being recorded."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return (*self._of_node(node), True)
        place = (self.stack[-1] if self.stack else "", self.line(call=True))
        if torch.is_grad_enabled():
            # The node was made just before its kernel runs, so its number is the last one given out.
            number = torch.autograd._get_sequence_nr() - 1
            if number not in self.forward:
                bisect.insort(self.sequence, number)
                self.forward[number] = place
        return (*place, False)

    def _of_node(self, node: Any) -> tuple[str, str]:
        number = node._sequence_nr()
        place = self.forward.get(number)
        if place is None and self.sequence:
            # A custom autograd function gets its number after the calls of its forward; accumulation has the largest number.
            at = bisect.bisect_right(self.sequence, number) - 1
            place = self.forward[self.sequence[at]] if 0 <= at < len(self.sequence) - 1 else None
        return place or ("", "")

    def line(self, call: bool = False) -> str:
        """The innermost line outside torch and kdk; of an operator's call, its function is counted where it is a slow path."""
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_filename.endswith(ENTRIES):
                return ""
            if code not in self.lines:
                hidden = code.co_filename.startswith(HIDDEN) or code.co_filename.endswith(SPEAKERS)
                self.lines[code] = None if hidden else short(code.co_filename)
            file = self.lines[code]
            if file is not None:
                if call and _stands_in(code):
                    self.slow[code] += 1
                return f"{file}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""


@functools.cache
def _stands_in(code: CodeType) -> bool:
    """A library's function (the author's own ones are the author's affair) that is a slow path by its name."""
    return "site-packages" in code.co_filename and SLOW_NAME.search(code.co_name) is not None


def package(code: CodeType) -> str:
    """The installed package that a function belongs to."""
    return short(code.co_filename).partition(os.sep)[0]


def short(file: str) -> str:
    """A path as people name it: below site-packages or the current folder."""
    for marker in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if marker in file:
            return file.rpartition(marker)[2]
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except ValueError:
        return file
