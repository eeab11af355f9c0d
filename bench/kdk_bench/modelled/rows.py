"""What is said of one contender for a chip that is not here: a row of its own table, never beside measured ones.

A language has a module here by its own name, with

    COLUMNS, cells(row)     what its table shows beside the contender
    Model(directory)        a context; .rows(heat, case) -> the rows of one operator, direction, case, dtype and chip
                            .cost(function, args, target) -> the `Cost` of a kernel's function, for `kdk tune`
                            .plain(heat, args) -> that of the reference without kdk, which takes the same arguments
    APART                   optional: seconds that a heat may take; its heats share nothing, so each has a process of its own
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

from kdk.backends import LANGUAGES, TARGETS, one_line
from kdk_bench.benchmarking.measuring import Heat
from kdk_bench.records import environment, today

MODELLED, COMPILED, REFUSED, FAILED, UNKNOWN = "modelled", "compiled", "refused", "failed", "unknown"


@dataclass(frozen=True)
class Row:
    """outcome: modelled, or compiled where there is no time; refused by `supports`; failed; unknown. reason: why.

    implementation: of kdk's, else empty. us: modelled microseconds. ratios: to what, and how many times it. figures: the
    language's own, as they stand in the report. caveats: what the figures leave out.
    """

    heat: Heat
    contender: str
    implementation: str
    outcome: str
    reason: str = ""
    us: float | None = None
    ratios: Mapping[str, float | None] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """A result of `kdk.bench/1`. Of the measured fields there are none."""
        known = self.outcome in (MODELLED, COMPILED)
        return {
            **asdict(self.heat),
            "contender": self.contender,
            "implementation": self.implementation,
            "outcome": self.outcome,
            "reason": self.reason,
            "seconds": {},
            "samples": [],
            "modelled_seconds": None if self.us is None else self.us * 1e-6,
            "ratios": dict(self.ratios),
            **self.figures,
            "caveats": list(self.caveats),
            "evidence": self.outcome if known else "",
            "environment": environment(),
            "date": today(),
        }


@dataclass(frozen=True)
class Cost:
    """order: the smaller the better, among launch configurations of one kernel. seconds: None where nothing has a time.

    text: the figures in words. evidence: what they are worth. why_not: why there are none.
    """

    order: tuple[float, ...] = ()
    seconds: float | None = None
    text: str = ""
    evidence: str = ""
    why_not: str = ""


def model_of(target: str) -> ModuleType | None:
    """The module that models a chip, by the language that is native to it; None where there is none."""
    name = f"{__package__}.{LANGUAGES[TARGETS[target]].name}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def failed(heat: Heat, contender: str, implementation: str, error: Exception) -> Row:
    """What was raised, as a row."""
    return Row(heat, contender, implementation, FAILED, f"{type(error).__name__}: {one_line(error)}")


def own_kernel(heat: Heat, implementation: str) -> tuple[Any, tuple[Any, ...]] | Row:
    """kdk's kernel and the arguments that it is called with, without data; or the row that says why there is none."""
    from kdk.dispatch import kernel_file
    from kdk.registry import OPERATORS
    from kdk_bench.compiling import rows as compiling
    from kdk_bench.expectation import Row as Line

    op, name = OPERATORS[heat.op].op, f"kdk {implementation}"
    if kernel_file(op, implementation, heat.direction) is None:
        return Row(heat, name, implementation, REFUSED, f"{op.name} has no {implementation} kernel for its {heat.direction}")
    lacks = LANGUAGES[implementation].module("compile").missing()
    if lacks:
        return Row(heat, name, implementation, UNKNOWN, lacks)
    try:
        task = compiling.Task(Line(heat.op, heat.direction, implementation, heat.target, heat.dtype), heat.case)
        function, args, reason = compiling.call(task)
    except Exception as error:
        return failed(heat, name, implementation, error)
    return Row(heat, name, implementation, REFUSED, reason) if reason else (function, args)


@dataclass(frozen=True)
class Reference:
    """A direction of an operator's reference as a function that another process finds; without what it saves for a backward."""

    op: str
    direction: str

    def __call__(self, *args: Any) -> Any:
        from kdk.registry import OPERATORS

        op = OPERATORS[self.op].op
        function = op.function(self.direction)
        assert function is not None
        results = function(*args)
        return results[: len(op.outputs)] if self.direction == "forward" and isinstance(results, tuple) else results
