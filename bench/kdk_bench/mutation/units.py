"""What is mutated: the functions that one kernel consists of, found by following names from its entry function."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kdk.backends import LANGUAGES
from kdk.dispatch import FILES, kernel_file
from kdk.op import Op
from kdk.registry import OPERATORS, require


@dataclass(frozen=True)
class Unit:
    """One operator, direction and language."""

    op: str
    direction: str
    language: str

    def __str__(self) -> str:
        return f"{self.op}.{self.direction} {self.language}"


def units(ops: tuple[str, ...] = (), directions: tuple[str, ...] = (), languages: tuple[str, ...] = ()) -> list[Unit]:
    """Every kernel that there is and that the filters leave."""
    require(ops)
    found = []
    for name in ops or sorted(OPERATORS):
        op = OPERATORS[name].op
        for direction in directions or ("forward", "backward"):
            for language in languages or LANGUAGES:
                file = kernel_file(op, language, direction)  # another operator's kernels (`backward_by`) are mutated as its own
                if op.function(direction) is not None and file and file.startswith(f"{op.package}."):
                    found.append(Unit(name, direction, language))
    return found


@dataclass
class Function:
    """A module-level function of a kernel's files. kernel: it runs on the device; the rest runs on the host."""

    module: str
    node: ast.FunctionDef
    kernel: bool


@dataclass
class Source:
    """A file of a kernel. constants: module-level names bound to numbers. imported: name -> module that it comes from."""

    module: str
    tree: ast.Module
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    imported: dict[str, str] = field(default_factory=dict)


def read(module: str, files: tuple[str, ...]) -> Source:
    """Parse a file without importing it. Imports are followed into files of these names only."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    source = Source(module, ast.parse(Path(spec.origin).read_text()))
    packages = {operator.op.package for operator in OPERATORS.values()}
    for statement in source.tree.body:
        if isinstance(statement, ast.FunctionDef):
            source.functions[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            names = [n.id for target in statement.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            source.constants |= set(names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            for alias in statement.names:
                package, _, name = statement.module.rpartition(".")
                if name in files and package in packages:  # and not kdk.backends.pallas
                    source.imported[alias.asname or alias.name] = statement.module
                elif alias.name.isupper():
                    source.constants.add(alias.asname or alias.name)
    source.constants |= {name for name in source.imported if name.isupper()}
    return source


class Reach:
    """The files and functions behind one unit. What its entry function does not reach is no part of it: `supports`, for one."""

    def __init__(self, op: Op, direction: str, language: str) -> None:
        self.files = (FILES[language], f"{FILES[language]}_backward")
        self.sources: dict[str, Source] = {}
        self.functions: dict[tuple[str, str], Function] = {}
        entry = kernel_file(op, language, direction)
        assert entry is not None
        self.entry = entry
        self._load(entry)
        self._visit(entry, direction, kernel=False)

    def _load(self, module: str) -> Source:
        """Imported files first, so that `sources` is in the order in which they can be executed."""
        if module not in self.sources:
            source = read(module, self.files)
            for imported in source.imported.values():
                self._load(imported)
            self.sources[module] = source
        return self.sources[module]

    def _visit(self, module: str, name: str, kernel: bool) -> None:
        source = self.sources[module]
        if name in source.imported:
            self._visit(source.imported[name], name, kernel)
            return
        if name not in source.functions:
            return
        known = self.functions.get((module, name))
        if known is not None and (known.kernel or not kernel):
            return
        node = source.functions[name]
        self.functions[module, name] = Function(module, node, kernel)
        for used, called in _names(node):
            if used != name and (used in source.functions or used in source.imported):
                # The host calls its helpers; what it hands on (kernel[grid], partial(kernel), run(kernel)) is a kernel.
                self._visit(module, used, kernel or not called)


def _names(node: ast.FunctionDef) -> Iterator[tuple[str, bool]]:
    """Every name that a function reads, and whether it is called."""
    called = {id(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
    for statement in node.body:
        for n in ast.walk(statement):
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load):
                yield n.id, id(n) in called


def sharing(chosen: list[Unit]) -> list[Unit]:
    """The other units that run a file of the chosen ones."""
    wanted = {file for unit in chosen for file in files(unit)}
    return [unit for unit in units() if unit not in chosen and files(unit) & wanted]


@functools.cache
def files(unit: Unit) -> frozenset[str]:
    """The names of the files behind a unit."""
    return frozenset(Reach(OPERATORS[unit.op].op, unit.direction, unit.language).sources)
