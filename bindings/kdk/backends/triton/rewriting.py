"""Turns the source of a @triton.jit function into a Python function that NumPy can run.

Triton's compiler makes a tensor of every assigned number, and understands `a < b < c` on tensors; plain Python does
neither. Triton's own interpreter rewrites the syntax tree for that, and so does this module, with two differences:
the names that the rewritten code needs are closure variables, so the globals of the kernel's module stay as they
are, and the variables that the kernel itself closes over keep their cells.
"""

from __future__ import annotations

import ast
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

from kdk.errors import SimulationError

_NAME = "_kdk_kernel"
_done: weakref.WeakKeyDictionary[Callable[..., Any], tuple[str, Callable[..., Any]]] = weakref.WeakKeyDictionary()


def rewritten(kernel: Any, semantic: Any) -> Callable[..., Any]:
    """The Python function for `kernel` (a JITFunction); `semantic` gets the calls `semantic.to_tensor(value,
    False)`."""
    known = _done.get(kernel.fn)
    if known is None or known[0] != kernel.src:
        known = (kernel.src, _rewrite(kernel, semantic))
        _done[kernel.fn] = known
    return known[1]


def _rewrite(kernel: Any, semantic: Any) -> Callable[..., Any]:
    from triton.runtime import interpreter as stock

    original = kernel.fn
    added = {"interpreter_semantic": semantic}
    comparison = getattr(stock, "_InterpreterComparison", None)
    if comparison is not None:
        added["_InterpreterComparison"] = comparison

    tree = ast.parse(kernel.src)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    if comparison is None:
        _refuse_chained_comparisons(definition)
    tree = stock.ASTTransformer().visit(tree)
    # Its own name must stay a global name inside it, or a kernel could not mention itself.
    definition.name, definition.decorator_list, definition.returns = _NAME, [], None
    outer = ast.parse(f"def _scope({', '.join([*original.__code__.co_freevars, *added])}):\n    pass")
    scope = outer.body[0]
    assert isinstance(scope, ast.FunctionDef)
    scope.body = [definition]
    ast.fix_missing_locations(outer)
    ast.increment_lineno(outer, _line_of_definition(kernel) - 1)

    code = compile(outer, original.__code__.co_filename, "exec", dont_inherit=True)
    code = _inner_code(_inner_code(code, "_scope"), _NAME)
    cells = {
        **dict(zip(original.__code__.co_freevars, original.__closure__ or ())),
        **{n: types.CellType(v) for n, v in added.items()},
    }
    closure = tuple(cells[name] for name in code.co_freevars)
    function = types.FunctionType(code, original.__globals__, original.__name__, original.__defaults__, closure)
    function.__kwdefaults__ = original.__kwdefaults__
    return function


def _inner_code(code: types.CodeType, name: str) -> types.CodeType:
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


def _line_of_definition(kernel: Any) -> int:
    lines = kernel.raw_src
    return kernel.starting_line_number + next(i for i, line in enumerate(lines) if re.match(r"\s*def\s+\w+\s*\(", line))


def _refuse_chained_comparisons(definition: ast.FunctionDef) -> None:
    for node in ast.walk(definition):
        if isinstance(node, ast.Compare) and len(node.ops) > 1:
            raise SimulationError(
                "KDK-TRITON-SYNTAX",
                f"{definition.name}: this triton release has no chained comparisons",
                value=ast.unparse(node),
                way_out="write (a < b) & (b < c)",
            )
