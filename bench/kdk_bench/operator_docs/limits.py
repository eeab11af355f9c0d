"""What each chip's kernel refuses: nothing declares it, so `supports` is asked, on tensors without data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kdk.backends import LANGUAGES, Language
from kdk.cases import Case
from kdk.dispatch import kernel_file, load_kernel, refusal
from kdk.errors import DeclarationError, InputError, UsageError
from kdk.indices import Indices
from kdk.op import Op
from kdk_bench.compiling.described import arguments
from kdk_bench.declared_cases import cases_of

LARGE = 1 << 20
"""The size at which each letter is asked for, one at a time, where no model's is larger."""


@dataclass(frozen=True)
class Refusal:
    """What is refused: by which language's kernel, in which direction, on which chips, in which dtypes, and why."""

    implementation: str
    direction: str
    targets: tuple[str, ...]
    dtypes: tuple[str, ...]
    reason: str


def asked(op: Op) -> list[Case]:
    """The models' shapes; the first of them with every value of every scalar argument, and with each letter large."""
    cases = cases_of(op)
    if not cases.models:
        return []
    first = cases.models[0]
    found = list(cases.models)
    for name, values in cases.scalars.items():
        found += [replace(first, name=f"{name}={value}", scalars={**first.scalars, name: value}) for value in values]
    for letter, dim in cases.dims.items():
        if not dim.at_most and first.sizes[letter] < LARGE:
            found.append(replace(first, name=f"{letter} large", sizes={**first.sizes, letter: LARGE}))
    return found


def calls(op: Op, direction: str, dtype: str) -> Iterator[tuple[Case, tuple[Any, ...]]]:
    """Every asked case that the operator takes, with a direction's arguments. `Cases.valid` is not asked: it also leaves out what is
    merely not worth a check."""
    cases = replace(cases_of(op), valid=None)
    for case in asked(op):
        try:
            forward = arguments(op, "forward", case, dtype, cases)
            op.check(*forward)
            yield case, forward if direction == "forward" else arguments(op, direction, case, dtype, cases)
        except (InputError, DeclarationError):  # a large letter, or a scalar, that does not go with the first model's sizes
            continue


def refusals(op: Op) -> list[Refusal]:
    """Every different reason that a kernel gives. Raises UsageError where a language cannot be imported here."""
    found: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    said: dict[tuple[str, str, str], str] = {}
    for direction in ("forward", "backward"):
        if op.function(direction) is None:
            continue
        languages = [language for name, language in LANGUAGES.items() if kernel_file(op, name, direction)]
        for dtype in op.dtypes:
            for language, target, reason in _reasons(op, direction, dtype, languages):
                key = (language.name, direction, _limit(reason))
                said.setdefault(key, reason)
                mine = found.setdefault(key, {}).setdefault(target, [])
                if dtype not in mine:
                    mine.append(dtype)
    rows = []
    for (implementation, direction, limit), by_target in found.items():
        reason = said[implementation, direction, limit]
        reason = limit if re.match(r"\w+( = \d+)?: ", reason) else reason
        for dtypes in dict.fromkeys(tuple(d) for d in by_target.values()):
            targets = tuple(target for target, mine in by_target.items() if tuple(mine) == dtypes)
            rows.append(Refusal(implementation, direction, targets, dtypes, reason))
    return sorted(rows, key=lambda row: (list(LANGUAGES).index(row.implementation), row.direction == "backward"))


def _limit(reason: str) -> str:
    """A reason without the value that was asked for: "H = 16384: rows fit up to H = 13653" says the same of every larger H."""
    return reason.partition(": ")[2] or reason


def _reasons(op: Op, direction: str, dtype: str, languages: list[Language]) -> Iterator[tuple[Language, str, str]]:
    kernels = []
    for language in languages:
        if dtype not in language.dtypes:
            reason = f"{dtype}: {language.no_dtype.get(dtype, f'{language.name} kernels do not take it')}"
            yield from ((language, target, reason) for target in language.targets)
            continue
        lacks = language.module("launch").missing("cpu")
        if lacks:
            raise UsageError("KDK-DOCS", f"what {language.name} kernels refuse cannot be asked here", value=lacks)
        language.module("launch").prepare()
        kernel = load_kernel(op, language.name, direction)
        assert kernel is not None
        if kernel.supports:
            kernels.append((language, kernel))
    indices = Indices(op, direction)
    for _, args in calls(op, direction, dtype) if kernels else ():
        given = indices.narrowed(args)
        for language, kernel in kernels:
            for target in language.targets:
                said = refusal(language, target, kernel)(given)
                if said:
                    yield language, target, said
