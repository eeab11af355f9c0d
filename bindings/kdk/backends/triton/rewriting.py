"""Turns the source of a @triton.jit function into a Python function that NumPy can run.

Triton's compiler makes a tensor of every assigned number and gives `and`, `or`, `not` and `a < b < c` a meaning on
tensors; Python asks a tensor for its truth instead, which for a block is wrong without a word. Triton's own interpreter
rewrites the assignments (and since 3.9 the chained comparisons); this module adds the rest. The names that the
rewritten code needs are closure variables, so the globals of the kernel's module stay as they are, and what the kernel
itself closes over keeps its cells.
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
    added: dict[str, Any] = {"_kdk_and": _and, "_kdk_or": _or, "_kdk_not": _not, "_kdk_branch": _branch}
    added["interpreter_semantic"] = semantic
    comparison = getattr(stock, "_InterpreterComparison", None)
    if comparison is not None:
        added["_InterpreterComparison"] = comparison

    tree = ast.parse(kernel.src)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    if comparison is None:
        _refuse_chained_comparisons(definition)
    tree = stock.ASTTransformer().visit(_Truth().visit(tree))
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


class _Truth(ast.NodeTransformer):
    """`a and b`, `a or b`, `not a` and branches by functions that know tensors."""

    def visit_branch(self, node: ast.If | ast.While | ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        node.test = ast.copy_location(_call("_kdk_branch", [node.test]), node.test)
        return node

    visit_If = visit_While = visit_IfExp = visit_branch

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        later: list[ast.expr] = [ast.Lambda(args=nothing, body=value) for value in node.values]
        name = "_kdk_and" if isinstance(node.op, ast.And) else "_kdk_or"
        return ast.copy_location(_call(name, later), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.copy_location(_call("_kdk_not", [node.operand]), node)


def _call(name: str, args: list[ast.expr]) -> ast.Call:
    return ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=args, keywords=[])


def _and(*values: Callable[[], Any]) -> Any:
    return _combined(values, False, "logical_and")


def _or(*values: Callable[[], Any]) -> Any:
    return _combined(values, True, "logical_or")


def _combined(values: tuple[Callable[[], Any], ...], decisive: bool, method: str) -> Any:
    """As the compiler does it: a constant decides at once or has no effect; tensors are all computed and combined."""
    import triton.language as tl

    tensors, value = [], None
    for value in (later() for later in values):
        if isinstance(value, tl.tensor):
            tensors.append(value)
        elif bool(value) is decisive:
            return value
    if not tensors:
        return value
    result = tensors.pop()
    while tensors:
        result = getattr(tensors.pop(), method)(result)
    return result


def _not(value: Any) -> Any:
    import triton.language as tl

    return value.__not__() if isinstance(value, tl.tensor) else not value


def _branch(value: Any) -> Any:
    """What `if` and `while` may ask."""
    import triton.language as tl

    if isinstance(value, tl.tensor) and value.handle.data.size != 1:
        raise SimulationError(
            "KDK-TRITON-BRANCH",
            "a block of values has no truth value to branch on",
            value=f"a block of shape {value.handle.data.shape}",
            way_out="tl.where, or reduce it first",
        )
    return value
