"""Every mutant of a unit, and a sample of them that is the same for the same seed."""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import itertools
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kdk.registry import OPERATORS
from kdk_bench.mutation.mutators import CLASSES, Place, called, is_position
from kdk_bench.mutation.units import Function, Reach, Source, Unit

# What these arguments say cannot change a result: where and how fast, not what.
LAUNCH_OPTIONS = {
    "num_warps",
    "num_stages",
    "num_ctas",
    "cost_estimate",
    "compiler_params",
    "interpret",
    "engine",
    "buffer",
    "name",
    "keep_dims",
    "keepdims",
    "strict",
}


@dataclass(frozen=True)
class Mutant:
    """One fault. before, after: the changed line of its function. source: the whole changed file."""

    unit: Unit
    kind: str
    module: str
    function: str
    line: int
    before: str
    after: str
    number: int  # among mutants of the unit that read alike
    source: str
    addressing: bool = False  # it changes where a kernel reads or writes, not what it computes
    branch: bool = False  # it changes which of two ways a kernel goes

    @property
    def key(self) -> str:
        """What it is called in the list of explained mutants."""
        again = f" #{self.number}" if self.number else ""
        return f"{self.unit} | {self.function}: {self.before} -> {self.after}{again}"

    def __str__(self) -> str:
        return f"{self.key} ({self.kind}, line {self.line})"


def all_mutants(unit: Unit) -> list[Mutant]:
    """Every mutant of a unit; of two with the same text, the one of the earlier class."""
    reach = Reach(OPERATORS[unit.op].op, unit.direction, unit.language)
    found: list[Mutant] = []
    seen: set[str] = set()
    counts: Counter[tuple[str, str, str]] = Counter()
    for function in reach.functions.values():
        source = reach.sources[function.module]
        at = source.tree.body.index(function.node)
        rest = [ast.unparse(statement) for statement in source.tree.body]
        original = rest[at]
        seen.add("\n".join(rest))
        for kind, place, changed in _changes(function, source):
            text = "\n".join([*rest[:at], changed, *rest[at + 1 :]])
            if text in seen or not _compiles(changed):
                continue
            seen.add(text)
            before, after = _difference(original, changed)
            name = function.node.name
            number = counts[name, before, after]
            counts[name, before, after] += 1
            line, addressing = _statement(place).lineno, place.is_index or not place.kernel or _for_positions(place)
            branch = isinstance(_statement(place), ast.If)
            found.append(Mutant(unit, kind, function.module, name, line, before, after, number, text, addressing, branch))
    return found


def sample(mutants: list[Mutant], seed: int) -> list[Mutant]:
    """All of them, in the order in which they are tried: every class in turn, at random within a class."""
    by_class: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_class.setdefault(mutant.kind, []).append(mutant)
    for kind, group in by_class.items():
        random.Random(hashlib.sha256(f"{group[0].unit} {kind} {seed}".encode()).digest()).shuffle(group)
    turns = itertools.zip_longest(*(by_class[kind] for kind in CLASSES if kind in by_class))
    return [mutant for turn in turns for mutant in turn if mutant is not None]


def _statement(place: Place) -> ast.stmt:
    """The statement that holds a place."""
    return next(n for n in (place.node, *reversed(place.parents)) if isinstance(n, ast.stmt))


def _for_positions(place: Place) -> bool:
    """Whether a place is part of a number that a loop's range, a slice or an access pattern is made from."""
    statement = _statement(place)
    return isinstance(statement, ast.Assign) and bool(_assigned(statement) & _sources_of_positions(place.parents[0]))


def _assigned(statement: ast.Assign) -> set[str]:
    return {n.id for target in statement.targets for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


@functools.cache  # a function is as it was whenever it is asked about
def _sources_of_positions(function: ast.AST) -> set[str]:
    """Names that positions are made from, whether they are positions or not: sizes, strides, numbers of passes."""
    places: list[ast.AST] = [n.slice for n in ast.walk(function) if isinstance(n, ast.Subscript)]
    places += [n for n in ast.walk(function) if isinstance(n, ast.Call) and called(n) in ("range", "ap")]
    names = {n.id for p in places for n in ast.walk(p) if isinstance(n, ast.Name)}
    while True:
        made = [n.value for n in ast.walk(function) if isinstance(n, ast.Assign) and _assigned(n) & names and not _computes_tiles(n.value)]
        more = names | {n.id for value in made for n in ast.walk(value) if isinstance(n, ast.Name)}
        if more == names:
            return names
        names = more


def _computes_tiles(value: ast.expr) -> bool:
    """Whether values are loaded or made here: what they are made from are no positions."""
    return any(isinstance(n, ast.Call) and called(n) not in ("min", "max", "cdiv", "len", "divmod", "range") for n in ast.walk(value))


def _compiles(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            compile(text, "mutant", "exec")
        except (SyntaxError, ValueError):
            return False
    return True


def _difference(original: str, text: str) -> tuple[str, str]:
    """The first changed line, before and after."""
    a, b = original.splitlines(), text.splitlines()
    for tag, i, j, k, l in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            return " ".join(line.strip() for line in a[i:j]), " ".join(line.strip() for line in b[k:l])
    return "", ""


def _changes(function: Function, source: Source) -> Iterator[tuple[str, Place, str]]:
    """(class, place, the function's text with one node replaced), for every place of a function."""
    for place, (holder, name, at) in _places(function, source):
        for kind, mutator in CLASSES.items():
            for replacement in mutator(place):
                _set(holder, name, at, replacement)
                try:
                    text = ast.unparse(function.node)
                finally:
                    _set(holder, name, at, place.node)
                yield kind, place, text


def _set(holder: ast.AST, name: str, at: int | None, node: ast.AST) -> None:
    if at is None:
        setattr(holder, name, node)
    else:
        getattr(holder, name)[at] = node


Slot = tuple[ast.AST, str, int | None]  # the node that holds another one, in which field, at which index


def _places(function: Function, source: Source) -> Iterator[tuple[Place, Slot]]:
    node = function.node
    names = _index_names(node)
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    parameters = frozenset(a.arg for a in arguments)

    def visit(holder: ast.AST, parents: tuple[ast.AST, ...], loops: dict[str, ast.expr]) -> Iterator[tuple[Place, Slot]]:
        for name, at, child in _children(holder):
            if _cannot_change_a_result(child, function.kernel, source.constants):
                continue
            chooses = name == "test" and isinstance(holder, ast.If | ast.IfExp) and not function.kernel
            if chooses and _is_tuning(child, source.constants):
                continue
            yield Place(child, (*parents, holder), function.kernel, names, loops, parameters), (holder, name, at)
            yield from visit(child, (*parents, holder), {**loops, **_loop(child)})

    for at, statement in enumerate(node.body):
        if _cannot_change_a_result(statement, function.kernel, source.constants):
            continue
        yield Place(statement, (node,), function.kernel, names, {}, parameters), (node, "body", at)
        yield from visit(statement, (node,), _loop(statement))


def _children(node: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    """Annotations, decorators and default values are no part of what a function computes."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        if isinstance(value, ast.AST):
            yield name, None, value
        elif isinstance(value, list):
            yield from ((name, i, child) for i, child in enumerate(value) if isinstance(child, ast.AST))


def _loop(node: ast.AST) -> dict[str, ast.expr]:
    """The variable of a loop over a range, and the first value that it takes."""
    if not isinstance(node, ast.For) or not isinstance(node.target, ast.Name):
        return {}
    if not isinstance(node.iter, ast.Call) or called(node.iter) != "range":
        return {}
    return {node.target.id: node.iter.args[0] if len(node.iter.args) > 1 else ast.Constant(0)}


def _index_names(function: ast.FunctionDef) -> set[str]:
    """Names that hold positions: variables of loops over a range, and what is computed from them and from arange alone."""
    names = {name for n in ast.walk(function) for name in _loop(n)}
    while True:
        more = set(names)
        for n in ast.walk(function):
            if isinstance(n, ast.Assign) and is_position(n.value, names):
                more |= {t.id for target in n.targets for t in ast.walk(target) if isinstance(t, ast.Name)}
        if more == names:
            return names
        names = more


def _cannot_change_a_result(node: ast.AST, kernel: bool, constants: set[str]) -> bool:
    """Docstrings, errors, launch options; and on the host the choice of tiles, for any of which a kernel is right."""
    if isinstance(node, ast.Raise | ast.Assert) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return True
    if isinstance(node, ast.keyword) and node.arg in LAUNCH_OPTIONS:
        return True
    if kernel or not isinstance(node, ast.Assign | ast.AnnAssign | ast.Return):
        return False
    launch = any(isinstance(n, ast.keyword) and n.arg in LAUNCH_OPTIONS for n in ast.walk(node))
    return not launch and _is_tuning(node, constants)


def _is_tuning(node: ast.AST, constants: set[str]) -> bool:
    """A choice of tiles shows by what it is made from: the file's own constants (widths, budgets), bytes, clamps."""
    for n in ast.walk(node):
        if isinstance(n, ast.Name) and n.id in constants:
            return True
        if isinstance(n, ast.Attribute) and n.attr == "itemsize":
            return True
        if isinstance(n, ast.Call) and called(n) in ("min", "max"):
            return True
    return False
