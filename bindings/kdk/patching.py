"""`patch(model)`: let the modules of a model call kdk's operators, `unpatch(model)`: and back.

Per instance: a replaced module gets an instance attribute `forward`, which hides the class's own. Weights, state_dict keys,
hooks and the class stay as they are, other models too. What replaces what stands in the operators' patterns.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from kdk import registry
from kdk.errors import UsageError
from kdk.patterns import FunctionPattern, LeftPattern, ModulePattern
from kdk.recording import record
from kdk.replacing import Replacement, differences, global_functions, quiet_trials, stand_in


@dataclass(frozen=True)
class Row:
    """A module of the model: replaced by operators (restored, in the report of `unpatch`), or left for a reason. note: when the
    operators run, where that is not always."""

    path: str
    cls: str
    operators: tuple[str, ...]
    reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class Report:
    """What `patch` or `unpatch` did. Printed: a table with one line per class and reason."""

    action: str
    rows: tuple[Row, ...]

    @property
    def replaced(self) -> tuple[Row, ...]:
        """What runs on operators after `patch`; what was put back by `unpatch`."""
        return tuple(row for row in self.rows if not row.reason)

    @property
    def left(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.reason)

    def __str__(self) -> str:
        if not self.rows:
            patched = self.action == "patched"
            why = "kdk has an operator for none of the modules" if patched else "the model is not patched"
            return f"{self.action}: nothing; {why}"
        groups = Counter((row.cls, _said(row), row.reason) for row in self.rows)
        first = {(row.cls, _said(row), row.reason): row.path for row in reversed(self.rows)}
        lines = [("class", "modules", "first at", "operator")]
        for key in sorted(groups, key=lambda k: (bool(k[2]), k)):
            cls, operators, reason = key
            lines.append((cls, str(groups[key]), first[key] or "(the model)", f"left: {reason}" if reason else operators))
        widths = [max(len(line[i]) for line in lines) for i in range(3)]
        table = [" ".join([f"{line[i]:<{widths[i]}} " for i in range(3)]) + line[3] for line in lines]
        return "\n".join([f"{self.action}: {len(self.replaced)} modules, {len(self.left)} left", *table])


def _said(row: Row) -> str:
    return ", ".join(row.operators) + (f" ({row.note})" if row.note else "")


def patch(model: nn.Module) -> Report:
    """Let the modules of `model` run on kdk's operators, in place. Doing it twice changes nothing more.

    A module is replaced when its class is recognised and a trial on a small example, on the CPU, agrees with the operator;
    else it is left, with the reason. `kdk.unpatch(model)` goes back.

    Deep copies, pickles and compiled models work; a shallow copy of a module (copy.copy, torch.nn.DataParallel) goes on calling
    the original. Hooks that are registered later on an activation inside a replaced MLP are not called. A replaced attention
    sees the global functions of its module as they were at the moment of patching. A language model that is trained with `labels`
    returns logits that are computed when they are used: a loop that reads the loss alone never makes them, one that reads them
    gets what it got before. Under torch.compile, and where its head has hooks or is sharded, they are made; `kdk.record` says so.

    Raises UsageError if `model` is not a torch.nn.Module.
    """
    _require_module(model, "patch")
    patterns = _patterns()
    tried: dict[Any, str | Callable[..., Any]] = {}
    rows = []
    with quiet_trials():
        found = [(path, module, _replacement(module, patterns, tried)) for path, module in model.named_modules()]
    for path, module, result in found:
        cls = type(module).__name__
        if isinstance(result, Replacement):
            module.forward = result
            rows.append(Row(path, cls, result.operators, note=result.note))
        elif result:
            rows.append(Row(path, cls, (), result))
    return Report("patched", tuple(rows))


def unpatch(model: nn.Module) -> Report:
    """Give every module of `model` that `patch` changed its own forward back.

    Raises UsageError if `model` is not a torch.nn.Module.
    """
    _require_module(model, "unpatch")
    rows = []
    for path, module in model.named_modules():
        mine = module.__dict__.get("forward")
        cls = type(module).__name__
        if isinstance(mine, Replacement):
            del module.forward
            rows.append(Row(path, cls, mine.operators))
        elif _below(mine):
            rows.append(Row(path, cls, (), "another forward was put over kdk's: take that away first"))
    return Report("unpatched", tuple(rows))


def _require_module(model: Any, name: str) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError("KDK-MODEL", f"kdk.{name}: model", value=type(model).__name__, limit="a torch.nn.Module is needed")


def _below(forward: Any) -> bool:
    """Whether kdk's replacement is what a foreign forward wraps (functools.wraps)."""
    while forward is not None:
        if isinstance(forward, Replacement):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


Pattern: TypeAlias = ModulePattern | FunctionPattern | LeftPattern


def _patterns() -> list[tuple[str, Pattern]]:
    """(operator, pattern) of every operator that has a patterns.py with such tables."""
    importlib.import_module("kdk.ops")  # registers the operators
    found: list[tuple[str, Pattern]] = []
    for name, operator in registry.OPERATORS.items():
        file = f"{operator.op.package}.patterns"
        if importlib.util.find_spec(file):
            module = importlib.import_module(file)
            found += [(name, p) for table in ("MODULES", "FUNCTIONS", "LEFT") for p in getattr(module, table, ())]
    return found


def _replacement(module: nn.Module, patterns: list[tuple[str, Pattern]], tried: dict[Any, Any]) -> Replacement | str | None:
    """What replaces the module's forward, or why it is left, or None when nobody claims it."""
    mine = module.__dict__.get("forward")
    if isinstance(mine, Replacement):
        return mine
    cls = type(module).__name__
    claims = [(name, p) for name, p in patterns if not isinstance(p, FunctionPattern) and re.fullmatch(p.classes, cls)]
    swaps, failed, operators = _swaps(module, patterns, tried)
    if mine is not None and (claims or swaps or failed):
        return "somebody else has set its forward"
    reasons: dict[str, str] = {}
    for name, pattern in claims:
        if isinstance(pattern, LeftPattern):
            reasons[name] = pattern.reason
        elif _missing(module, pattern):
            reasons.setdefault(name, f"not {name}: it has no {', '.join(_missing(module, pattern))}")
        else:
            chosen = _choose(module, name, pattern)
            if not isinstance(chosen, str):
                return Replacement(module, (name,), chosen, note=pattern.note)
            reasons[name] = f"not {name}: {chosen}"
    if swaps:
        try:
            return Replacement(module, operators, swaps=swaps)
        except TypeError as error:
            failed.append(str(error))
    return "; ".join([*reasons.values(), *failed]) or None


def _missing(module: nn.Module, pattern: ModulePattern) -> list[str]:
    return [name for name in pattern.attributes if not hasattr(module, name)]


def _choose(module: nn.Module, operator: str, pattern: ModulePattern) -> Callable[..., Any] | str:
    """The forward of the pattern that agrees with the module, or why there is none."""
    parameters = list(inspect.signature(type(module).forward).parameters)
    if not pattern.around and len(parameters) != len(inspect.signature(pattern.forwards[0]).parameters):
        return f"its forward takes {', '.join(parameters[1:])}"
    for name, child in module.named_children():
        if name in pattern.attributes:
            continue
        if next(child.parameters(), None) is not None:
            return f"it has a further layer with weights, {name}"
        if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
            return f"there are hooks on {name}, which would not be called"
    reason = pattern.refuse(module)
    if reason:
        return reason
    trials = pattern.trials(module)
    reason = ""
    for forward in pattern.forwards:
        doubles = [(trial, (stand_in(module, trial, pattern.attributes), *trial.args)) for trial in trials]
        with record() as ran:
            disagreement = differences(type(module).forward, forward, doubles)
        if disagreement is None and pattern.around and not ran.calls(operator):
            disagreement = f"on a small example its forward does not come to {operator}"
        if disagreement is None:
            return forward
        reason = reason or disagreement
    return reason


def _swaps(
    module: nn.Module, patterns: list[tuple[str, Pattern]], tried: dict[Any, Any]
) -> tuple[dict[str, Callable[..., Any]], list[str], tuple[str, ...]]:
    """Global functions that the module's forward calls and operators replace; why others are left; the operators."""
    swaps: dict[str, Callable[..., Any]] = {}
    failed: list[str] = []
    operators: list[str] = []
    wanted = [(name, p) for name, p in patterns if isinstance(p, FunctionPattern)]
    for called, function in global_functions(type(module).forward).items():
        for name, pattern in wanted:
            if not re.fullmatch(pattern.names, function.__name__):
                continue
            if (function, name) not in tried:
                tried[function, name] = _choose_function(function, pattern)
            chosen = tried[function, name]
            if isinstance(chosen, str):
                failed.append(f"{function.__name__} is not {name}: {chosen}")
            else:
                swaps[called] = chosen
                operators.append(name)
    return swaps, failed, tuple(dict.fromkeys(operators))


def _choose_function(function: Callable[..., Any], pattern: FunctionPattern) -> Callable[..., Any] | str:
    """The pattern's replacement that agrees with a function, or why there is none."""
    reason = ""
    parameters = list(inspect.signature(function).parameters)
    trials = pattern.trials()
    for replacement in pattern.replacements:
        if parameters != list(inspect.signature(replacement).parameters):
            disagreement: str | None = f"it takes {', '.join(parameters)}"
        else:
            disagreement = differences(function, replacement, [(trial, trial.args) for trial in trials])
        if disagreement is None:
            return replacement
        reason = reason or disagreement
    return reason
