"""The classes of faults. Each looks at one place of a kernel's syntax tree and says what may stand there instead.

They know Python and the vocabulary of the kernel languages, and no operator.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Replacements = Iterator[ast.AST]


@dataclass
class Place:
    """A node and what surrounds it."""

    node: ast.AST
    parents: tuple[ast.AST, ...]  # the function first, the nearest last
    kernel: bool
    index_names: set[str]  # names that hold positions
    loops: dict[str, ast.expr] = field(default_factory=dict)  # variable of an enclosing loop or lambda -> its first value
    parameters: frozenset[str] = frozenset()  # of the kernel: sizes, strides

    @property
    def parent(self) -> ast.AST:
        return self.parents[-1]

    @property
    def is_index(self) -> bool:
        """Whether the node computes a position: it stands in a subscript or a range, or is made of positions alone."""
        return self.in_subscript or self.positions(self.node)

    @property
    def in_subscript(self) -> bool:
        return any(
            (isinstance(p, ast.Subscript) and p.slice is child) or (isinstance(p, ast.Call) and called(p) in ("range", "ap"))
            for p, child in itertools.pairwise((*self.parents, self.node))
        )

    def positions(self, node: ast.AST) -> bool:
        return is_position(node, self.index_names)


POSITIONS = ("arange", "program_id", "num_programs", "broadcasted_iota", "iota")


def is_position(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is made of indices and no values that were loaded."""
    found = False
    for n in ast.walk(node):
        if isinstance(n, ast.Call) and called(n) in ("load", "sum", "where", "dot"):
            return False
        found |= isinstance(n, ast.Call) and called(n) in POSITIONS
        found |= isinstance(n, ast.Name) and n.id in names
    return found


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    f = node.func
    return f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ""


def number(value: float) -> ast.expr:
    return ast.Constant(value)


def binary(left: ast.expr, op: ast.operator, right: ast.expr) -> ast.expr:
    return ast.BinOp(left, op, right)


def minus(node: ast.expr, amount: ast.expr) -> ast.expr:
    return binary(node, ast.Sub(), amount)


def plus(node: ast.expr, amount: ast.expr) -> ast.expr:
    return binary(node, ast.Add(), amount)


def is_number(node: ast.AST, *values: float) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, bool | str) and node.value in values


def keyword(node: ast.Call, name: str) -> ast.keyword | None:
    return next((k for k in node.keywords if k.arg == name), None)


def with_arguments(node: ast.Call, args: list[ast.expr] | None = None, keywords: list[ast.keyword] | None = None) -> ast.Call:
    return ast.Call(node.func, node.args if args is None else args, node.keywords if keywords is None else keywords)


# ---- the classes ------------------------------------------------------------------------------------------------------

INVERSE: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
}
SPELLED = {
    "add": "subtract",
    "subtract": "add",
    "multiply": "add",
    "maximum": "minimum",
    "minimum": "maximum",
    "max": "min",
    "min": "max",
    "sum": "max",
    "rsqrt": "sqrt",
    "sqrt": "rsqrt",
    "exp": "exp2",
}
WEAKER: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMMUTATIVE = ("add", "multiply", "maximum", "minimum")
AXIS_FIRST = ("program_id", "num_programs", "sum", "mean", "unsqueeze", "squeeze", "flatten", "broadcast")


def constant(p: Place) -> Replacements:
    n = p.node
    if not isinstance(n, ast.Constant) or (isinstance(p.parent, ast.keyword) and p.parent.arg == "other"):
        return
    if isinstance(n.value, bool):
        yield number(not n.value)
    elif isinstance(n.value, float):
        yield number(2 * n.value if n.value else 1.0)
    elif isinstance(n.value, int) and p.kernel and isinstance(p.parent, ast.BinOp | ast.Compare) and not p.in_subscript:
        yield number(n.value + 1)


def operator(p: Place) -> Replacements:
    n = p.node
    if isinstance(n, ast.BinOp) and type(n.op) in INVERSE:
        neutral = (0,) if isinstance(n.op, ast.Add | ast.Sub) else (1,)
        if not is_number(n.right, *neutral):
            # A position is an integer: another one, not a fraction.
            changed = ast.Add() if isinstance(n.op, ast.Mult) and p.is_index else INVERSE[type(n.op)]()
            yield binary(n.left, changed, n.right)
    elif isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.USub) and not isinstance(n.operand, ast.Constant):
        yield n.operand
    elif isinstance(n, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(n.op, ast.And) else ast.And(), n.values)
    elif isinstance(n, ast.Attribute) and n.attr in SPELLED and p.kernel:
        yield ast.Attribute(n.value, SPELLED[n.attr], n.ctx)
    elif isinstance(n, ast.Name) and n.id in ("min", "max") and p.kernel:
        yield ast.Name(SPELLED[n.id], n.ctx)


def comparison(p: Place) -> Replacements:
    n = p.node
    if isinstance(n, ast.Compare) and len(n.ops) == 1 and type(n.ops[0]) in WEAKER:
        yield ast.Compare(n.left, [WEAKER[type(n.ops[0])]()], n.comparators)


def dropped_mask(p: Place) -> Replacements:
    n = p.node
    if isinstance(n, ast.Call) and keyword(n, "mask"):
        yield with_arguments(n, keywords=[k for k in n.keywords if k.arg not in ("mask", "other")])
        if keyword(n, "other"):  # what stands in for the lanes that are masked off
            yield with_arguments(n, keywords=[k for k in n.keywords if k.arg != "other"])
    elif isinstance(n, ast.Call) and called(n) == "where" and len(n.args) == 3:
        yield n.args[1]
    elif isinstance(n, ast.BinOp) and isinstance(n.op, ast.BitAnd):
        yield n.left
        yield n.right


def wrong_axis(p: Place) -> Replacements:
    n = p.node
    if isinstance(n, ast.keyword) and n.arg in ("axis", "dim") and (axis := _literal(n.value)) is not None:
        yield ast.keyword(n.arg, number(_other_axis(axis)))
    elif isinstance(n, ast.Call) and called(n) in AXIS_FIRST and n.args and (axis := _literal(n.args[0])) is not None:
        yield with_arguments(n, [number(_other_axis(axis)), *n.args[1:]])
    elif isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Tuple) and any(map(_is_none, n.slice.elts)):
        yield ast.Subscript(n.value, ast.Tuple(n.slice.elts[::-1], ast.Load()), n.ctx)
    elif isinstance(n, ast.Subscript) and ast.unparse(n.value).endswith(".shape") and (axis := _literal(n.slice)) is not None:
        yield ast.Subscript(n.value, number(_other_axis(axis)), n.ctx)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _literal(node: ast.AST) -> int | None:
    """The value of an integer literal, negative ones included."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        return None if value is None else -value
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _other_axis(axis: int) -> int:
    return {0: 1, 1: 0, -1: -2, -2: -1}.get(axis, axis - 1)


def off_by_one(p: Place) -> Replacements:
    n, one = p.node, number(1)
    if isinstance(n, ast.Compare) and len(n.ops) == 1 and isinstance(n.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        if p.positions(n.left):
            yield ast.Compare(n.left, n.ops, [minus(n.comparators[0], one)])
            yield ast.Compare(n.left, n.ops, [plus(n.comparators[0], one)])
    elif isinstance(n, ast.Call) and called(n) == "range":
        stop = 0 if len(n.args) == 1 else 1
        yield with_arguments(n, [minus(a, one) if i == stop else a for i, a in enumerate(n.args)])
        if stop:
            yield with_arguments(n, [plus(n.args[0], one), *n.args[1:]])
    elif isinstance(n, ast.Call) and called(n) == "min" and p.kernel:
        yield minus(n, one)
    elif isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Slice) and n.slice.lower and n.slice.upper:
        for change in (plus, minus):
            moved = ast.Slice(change(n.slice.lower, one), change(n.slice.upper, one), n.slice.step)
            yield ast.Subscript(n.value, moved, n.ctx)


def missing_cast(p: Place) -> Replacements:
    n = p.node
    if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("to", "astype") and len(n.args) == 1:
        stored = isinstance(p.parent, ast.Call) and called(p.parent) == "store"
        if not stored:  # a store casts to its pointer's type by itself
            yield n.func.value
    if isinstance(n, ast.Attribute) and n.attr == "float32":
        yield ast.Attribute(n.value, "bfloat16", n.ctx)


def lost_accumulation(p: Place) -> Replacements:
    n = p.node
    if isinstance(n, ast.AugAssign):
        yield ast.Assign([n.target], n.value, lineno=n.lineno)


def stale_tile(p: Place) -> Replacements:
    """A statement in a loop, or a block's index map, that never leaves the first tile."""
    n = p.node
    if isinstance(n, ast.Assign | ast.AugAssign | ast.Expr):
        for name, first in p.loops.items():
            if any(isinstance(c, ast.Name) and c.id == name for c in ast.walk(n)):
                yield _Replaced(name, first).visit(ast.parse(ast.unparse(n)).body[0])
    elif isinstance(n, ast.Lambda):
        for argument in n.args.args:
            if any(isinstance(c, ast.Name) and c.id == argument.arg for c in ast.walk(n.body)):
                body = _Replaced(argument.arg, number(0)).visit(ast.parse(ast.unparse(n.body), mode="eval").body)
                yield ast.Lambda(n.args, body)


class _Replaced(ast.NodeTransformer):
    def __init__(self, name: str, value: ast.expr) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.value if node.id == self.name and isinstance(node.ctx, ast.Load) else node


def wrong_stride(p: Place) -> Replacements:
    n = p.node
    if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult) and p.kernel and p.is_index:
        if isinstance(n.right, ast.Name) and n.right.id in p.parameters:
            yield n.left
        elif isinstance(n.left, ast.Name) and n.left.id in p.parameters:
            yield n.right
    elif isinstance(n, ast.Call) and called(n) == "stride":
        if n.args and (axis := _literal(n.args[0])) is not None:
            yield with_arguments(n, [number(_other_axis(axis))])
        elif not n.args:
            backwards = ast.Slice(None, None, ast.UnaryOp(ast.USub(), number(1)))
            yield ast.Subscript(n, backwards, ast.Load())
    elif isinstance(n, ast.List) and p.kernel and p.in_subscript and len(n.elts) == 2 and isinstance(p.parent, ast.List):
        yield ast.List([plus(n.elts[0], number(1)), n.elts[1]], n.ctx)  # [stride, length] of an access pattern


def wrong_index(p: Place) -> Replacements:
    n = p.node
    if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add) and p.kernel and p.is_index:
        yield n.left
        if p.positions(n.left):  # without it a pointer would not be one
            yield n.right
    elif isinstance(n, ast.Call) and called(n) == "program_id":
        yield binary(n, ast.Mult(), number(0))
    elif isinstance(n, ast.Constant) and type(n.value) is int and any(isinstance(a, ast.Lambda) for a in p.parents):
        yield number(n.value + 1)  # in a block's index map


def swapped_operands(p: Place) -> Replacements:
    n = p.node
    if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod):
        if ast.dump(n.left) != ast.dump(n.right):
            yield binary(n.right, n.op, n.left)
    elif isinstance(n, ast.Call) and called(n) == "where" and len(n.args) == 3:
        yield with_arguments(n, [n.args[0], n.args[2], n.args[1]])
    elif isinstance(n, ast.Call) and keyword(n, "data1") and keyword(n, "data2"):
        op = keyword(n, "op")
        if op is None or not (isinstance(op.value, ast.Attribute) and op.value.attr in COMMUTATIVE):
            renamed = {"data1": "data2", "data2": "data1"}
            yield with_arguments(n, keywords=[ast.keyword(renamed.get(k.arg or "", k.arg), k.value) for k in n.keywords])
    elif isinstance(n, ast.Call) and (isinstance(n.func, ast.Subscript | ast.Call)) and not p.kernel:
        for i, (a, b) in enumerate(zip(n.args, n.args[1:])):  # a launch
            if isinstance(a, ast.Name) and isinstance(b, ast.Name):
                yield with_arguments(n, [*n.args[:i], b, a, *n.args[i + 2 :]])


def skipped_last_tile(p: Place) -> Replacements:
    n = p.node
    if isinstance(n, ast.Call) and called(n) == "cdiv":
        yield minus(n, number(1))
    elif isinstance(n, ast.Call) and called(n) == "range" and len(n.args) == 3:
        yield with_arguments(n, [n.args[0], minus(n.args[1], n.args[2]), n.args[2]])
    elif isinstance(n, ast.Call) and called(n) == "range" and len(n.args) == 1:
        yield with_arguments(n, [minus(n.args[0], number(1))])


def missing_term(p: Place) -> Replacements:
    n = p.node
    if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add | ast.Sub) and p.kernel and not p.is_index:
        yield n.left
        if isinstance(n.op, ast.Add):
            yield n.right
    elif isinstance(n, ast.Call) and keyword(n, "op1") and keyword(n, "operand1"):
        yield with_arguments(n, keywords=[k for k in n.keywords if k.arg not in ("op1", "operand1")])


CLASSES: dict[str, Callable[[Place], Replacements]] = {
    "constant": constant,
    "operator": operator,
    "comparison": comparison,
    "dropped mask": dropped_mask,
    "wrong axis": wrong_axis,
    "off-by-one bound": off_by_one,
    "missing cast": missing_cast,
    "lost accumulation": lost_accumulation,
    "stale tile": stale_tile,
    "wrong stride": wrong_stride,
    "wrong index": wrong_index,
    "swapped operands": swapped_operands,
    "skipped last tile": skipped_last_tile,
    "missing residual term": missing_term,
}
