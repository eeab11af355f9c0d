"""The Python subset of the parser front end (NKI 0.2 to 0.6): what it would reject in a kernel's source and arguments."""

from __future__ import annotations

import ast
import builtins
import enum
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

from .errors import build_error
from .objects import NKIObject

OUTSIDE = ("nki", "kdk.backends.nki.emulator", "numpy", "torch", "math", "ml_dtypes", "builtins", "typing", "functools")

REJECTED: dict[type[ast.AST], str] = {
    ast.Yield: "a generator (yield)",
    ast.YieldFrom: "a generator (yield from)",
    ast.GeneratorExp: "a generator expression",
    ast.Try: "try",
    ast.Raise: "raise; use assert",
    ast.Lambda: "lambda",
    ast.AsyncFunctionDef: "async def",
    ast.Await: "await",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.Match: "match",
    ast.Set: "a set",
    ast.SetComp: "a set comprehension",
    ast.Starred: "unpacking with *",
    ast.Delete: "del",
    ast.NamedExpr: "an assignment expression (:=)",
    ast.Import: "an import inside a function",
    ast.ImportFrom: "an import inside a function",
}


def check(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse the first construct that the parser front end does not take, in the kernel and in what it calls."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        _check_argument(f"argument {name}", value)
    seen: set[int] = set()
    pending: list[Any] = [function]
    while pending:
        found = pending.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if inspect.isclass(found):
            _check_class(found)
        else:
            pending += _check_function(found)


def _check_argument(what: str, value: Any) -> None:
    if isinstance(value, list):
        raise build_error("parser", f"{what} is a list; kernels take tuples")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise build_error("parser", f"{what} is a dict with the key {key!r}; keys are strings")
            _check_argument(f"{what}[{key!r}]", item)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            _check_argument(f"{what}[{i}]", item)


def _check_class(cls: type) -> None:
    if issubclass(cls, enum.Enum):
        return
    if cls.__bases__ != (NKIObject,):
        raise build_error(
            "parser", f"class {cls.__name__} derives from {[b.__name__ for b in cls.__bases__]}; only nl.NKIObject", _site(cls)
        )


def _site(found: Any, line: int = 0) -> str:
    try:
        first = inspect.getsourcelines(found)[1]
        return f"{(inspect.getsourcefile(found) or '?').rsplit('/', 1)[-1]}:{first + max(0, line - 1)}"
    except (OSError, TypeError):
        return "unknown line"


def _check_function(function: FunctionType) -> list[Any]:
    """Check one function; returns the functions and classes that it names."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return []  # no source: built in, or made at run time
    tree = ast.parse(source)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return []
    for node, problem in _problems(definition):
        raise build_error("parser", f"{problem} in {function.__name__}", _site(function, getattr(node, "lineno", 1)))
    scope = inspect.getclosurevars(function)
    known = {**scope.globals, **scope.nonlocals}
    named = [known.get(n.id) for n in ast.walk(definition) if isinstance(n, ast.Name)]
    for node in ast.walk(definition):  # module.function
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and inspect.ismodule(known.get(node.value.id)):
            named.append(getattr(known[node.value.id], node.attr, None))
    called = [getattr(v, "function", v) if type(v).__name__ == "Kernel" else v for v in named]  # a kernel calls kernels
    return [v for v in called if _is_ours(v)]


def _is_ours(value: Any) -> bool:
    """Part of the kernel's own code, not of a library or of NKI."""
    module = getattr(value, "__module__", None) or ""
    inside = isinstance(value, FunctionType) or inspect.isclass(value)
    foreign = any(module == name or module.startswith(f"{name}.") for name in OUTSIDE)
    return inside and not foreign and not hasattr(builtins, getattr(value, "__name__", ""))


def _problems(definition: ast.FunctionDef) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(definition):
        if type(node) in REJECTED:
            yield node, REJECTED[type(node)]
        elif isinstance(node, ast.Compare) and any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            yield node, "`is`; compare with == or != (also with None)"
        elif isinstance(node, ast.FunctionDef) and node.args.kwonlyargs:
            yield node, "keyword-only arguments (the separator *)"
        elif isinstance(node, ast.FunctionDef) and (node.args.vararg or node.args.kwarg):
            yield node, "*args or **kwargs"
        elif isinstance(node, ast.FunctionDef) and node is not definition and node.decorator_list:
            yield node, f"the decorated inner function {node.name}"
        elif isinstance(node, ast.Dict) and any(isinstance(k, ast.Constant) and not isinstance(k.value, str) for k in node.keys):
            yield node, "a dict with keys that are not strings"
