"""What an operator's patterns.py says about models: which modules and functions it replaces. Imports no torch.

A class is recognised by its name and its attributes, and then tried: the module's own forward and the replacement run on the
same small inputs, on the CPU, and have to agree. A class that changed its formula in another version of its library, or that
only shares a name, fails the trial and is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kdk.recording import inlined

__all__ = ["FunctionPattern", "LeftPattern", "ModulePattern", "Trial", "inlined"]


@dataclass(frozen=True)
class Trial:
    """One comparison. attributes: what a stand-in of the module gets in place of its own (small random weights).

    Arguments and attributes are CPU tensors and modules; whoever makes them may use the global random numbers.
    """

    args: tuple[Any, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModulePattern:
    """`MODULES`: modules whose forward an operator replaces, as a whole.

    classes: a regular expression for the whole name of the class.
    attributes: what the replacement reads of the module. Other children must hold no parameters (an activation).
    forwards: functions `(self, ...)` at module level (they are pickled by name), built on kdk.ops, with as many parameters as
        the class's forward. The first that agrees in every trial replaces it.
    trials: makes the comparisons for an instance.
    refuse: why an instance is left, or None.
    around: the replacement calls the class's own forward, with whatever arguments it takes: `(self, *args, **kwargs)`. A trial must
        come to the operator. Where a call does not, the replacement says so: `inlined(operator, reason)`.
    note: what the report says beside the operator.
    """

    classes: str
    attributes: tuple[str, ...]
    forwards: tuple[Callable[..., Any], ...]
    trials: Callable[[Any], list[Trial]]
    refuse: Callable[[Any], str | None] = lambda module: None
    around: bool = False
    note: str = ""


@dataclass(frozen=True)
class FunctionPattern:
    """`FUNCTIONS`: global functions that the forward of a module calls by name.

    names: a regular expression for the function's whole name.
    replacements: functions at module level with the parameters of the original. The first that agrees is called instead.
    """

    names: str
    replacements: tuple[Callable[..., Any], ...]
    trials: Callable[[], list[Trial]]


@dataclass(frozen=True)
class LeftPattern:
    """`LEFT`: classes that look like the operator and are none. They are reported with the reason."""

    classes: str
    reason: str
