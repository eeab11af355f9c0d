"""A case as one line, "plain: N=3 H=65 eps=1e-05 layout=strided", and back: what `--case` takes beside a name."""

from __future__ import annotations

import ast
import math
from dataclasses import MISSING, fields
from typing import Any

from kdk.errors import UsageError
from kdk.op import Op
from kdk_bench.declared_cases import cases_of
from kdk_bench.generate import Problem, fit

SPELLED_APART = ("name", "sizes", "lead", "scalars", "counted")
DEFAULTS = {f.name: f.default for f in fields(Problem) if f.name not in SPELLED_APART and f.default is not MISSING}


def spell(op: Op, problem: Problem) -> str:
    """The name of the case that it comes from, then every letter and other scalar, then what is not as usual."""
    origin = problem.name.partition(": ")[0]
    words = [f"{letter}={_size(problem, letter)}" for letter in problem.sizes]
    words += [f"{name}={value}" for name, value in problem.scalars.items() if name not in op.sized.values()]  # a letter says those
    for name, usual in {**DEFAULTS, "needs": tuple(op.uses)}.items():
        value = getattr(problem, name)
        if value != usual:
            words.append(f"{name}={','.join(value) if isinstance(value, tuple) else str(value).replace(' ', '-')}")
    return f"{origin}: {' '.join(words)}"


def _size(problem: Problem, letter: str) -> str:
    """6, or 2x3 where the letter is spread over dimensions; (): over none."""
    lead = problem.lead.get(letter, (problem.sizes[letter],))
    return "x".join(map(str, lead)) or "()"


def parse(op: Op, text: str) -> Problem:
    """The case that a line spells. Raises UsageError for words that it does not know, and sizes that the operator cannot have."""
    cases = cases_of(op)
    sizes: dict[str, int] = {}
    lead: dict[str, tuple[int, ...]] = {}
    scalars = {name: options[0] for name, options in cases.scalars.items()}
    others: dict[str, Any] = {"needs": tuple(op.uses)}
    for word in text.partition(": ")[2].split():
        name, _, value = word.partition("=")
        if name in cases.dims:
            spread = () if value == "()" else tuple(int(n) for n in _checked(value.replace("x", ""), value, word).split("x"))
            sizes[name] = math.prod(spread)
            lead |= {name: spread} if any(f"*{name}" in shape.split() for shape in op.shapes.values()) else {}
        elif name in scalars:
            scalars[name] = _literal(value)
        elif name in DEFAULTS:
            tuples = isinstance(DEFAULTS[name], tuple)
            others[name] = tuple(filter(None, value.split(","))) if tuples else value.replace("-", " ")
        else:
            known = f"words are {', '.join([*cases.dims, *scalars, *DEFAULTS])}, each with ="
            raise UsageError("KDK-CASE", f"{op.name}: a case has no such word", value=repr(word), limit=known)
    missing = [letter for letter in cases.dims if letter not in sizes]
    if missing or fit(sizes, cases.dims) != sizes:
        limit = f"it lacks {', '.join(missing)}" if missing else f"the nearest sizes are {fit(sizes, cases.dims)}"
        raise UsageError("KDK-CASE", f"{op.name} cannot have these sizes", value=repr(text), limit=limit)
    scalars |= {scalar: sizes[letter] for letter, scalar in op.sized.items()}
    return Problem(name=text, sizes=sizes, lead=lead, scalars=scalars, counted=math.prod(sizes.values()) > 1, **others)


def _checked(digits: str, value: str, word: str) -> str:
    if not digits.isdigit():
        raise UsageError("KDK-CASE", "no size of a letter", value=repr(word), limit="a number, 2x3 over two dimensions, () over none")
    return value


def _literal(value: str) -> Any:
    """A number, True, False or None; else the text itself."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
