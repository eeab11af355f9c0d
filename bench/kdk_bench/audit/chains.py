"""Formulas that are looked for: the spellings of every registered operator, and of a catalogue of those that have none yet."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kdk.op import Op
from kdk_bench.audit import canonical
from kdk_bench.audit.recorder import Session
from kdk_bench.audit.trace import Ref

# A scalar argument is recognised in a trace by a value that nothing else has.
MARKS = (0.0123456, 0.0234567, 0.0345678, 0.0456789)


@dataclass(frozen=True)
class Chain:
    """A formula: its reference, its spellings with the scalar arguments with which the reference equals each, and the shapes of
    its tensors in letters. outputs: how many results of the reference a model sees. integers: tensor -> the letter that it points
    into. bounded: letters that are at most another's. optional: tensors that a spelling may do without. sized: letter -> the int
    argument that is its size. part: of an operator's formula the part that models share, where its scalars are tensors. choice: its
    result is a choice."""

    name: str
    reference: Callable[..., Any]
    spellings: tuple[tuple[Callable[..., Any], Mapping[str, Any]], ...]
    shapes: Mapping[str, str]
    outputs: int
    sizes: Mapping[str, int]
    scalars: Mapping[str, Any] = field(default_factory=dict)
    integers: Mapping[str, str] = field(default_factory=dict)
    bounded: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    sized: Mapping[str, str] = field(default_factory=dict)
    part: bool = False
    choice: bool = False

    @property
    def arguments(self) -> list[str]:
        return list(self.parameters)

    @functools.cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.reference).parameters

    def in_any_order(self, output: int) -> bool:
        """Whether a result lists some of many that were chosen: torch.topk(sorted=False) gives them as they come."""
        words = [text for name, text in self.shapes.items() if name not in self.parameters][output].split()
        return self.choice and bool(words) and words[-1] in self.bounded

    def values(self, given: Mapping[str, Any]) -> list[Any]:
        """All arguments in order: those given, else their defaults, else None."""
        defaults = {name: None if p.default is inspect.Parameter.empty else p.default for name, p in self.parameters.items()}
        return [given.get(name, default) for name, default in defaults.items()]


@dataclass(frozen=True)
class Pattern:
    """A spelling as a graph. outputs: its results' values; places: value -> name of the tensor argument; marks: number -> name of
    the scalar argument that has it."""

    chain: Chain
    spelling: str
    scalars: Mapping[str, Any]
    graph: canonical.Graph
    outputs: tuple[int, ...]
    places: Mapping[int, str]
    marks: Mapping[float, str]


def chains() -> list[Chain]:
    """Of every registered operator with spellings, then of the catalogue, except what an operator has as a whole."""
    from kdk import registry
    from kdk_bench.audit.catalogue import CATALOGUE

    found = [chain for operator in registry.OPERATORS.values() if (chain := _of(operator.op))]
    names = {chain.name for chain in found}
    return found + [chain for chain in CATALOGUE if chain.part or chain.name not in names]


def _of(op: Op) -> Chain | None:
    file = f"{op.package}.patterns"
    if not importlib.util.find_spec(file):
        return None
    spellings = getattr(importlib.import_module(file), "SPELLINGS", ())
    if not spellings:
        return None
    cases = importlib.import_module(f"{op.package}.cases").CASES
    sizes = {letter: _size(cases.dims, letter, at) for at, letter in enumerate(cases.dims)}
    # A spelling equals the operator with its defaults, but for what it names.
    defaults = {name: p.default for name, p in op.signature.parameters.items() if p.default is not p.empty}
    scalars = {name: values[0] for name, values in cases.scalars.items()}
    scalars |= {name: value for name, value in defaults.items() if name not in op.tensors}
    # The size of a letter that no tensor of the model has (the number of groups) is read from the trace like other numbers.
    seen = {word.strip("*").partition("|")[0] for name in (*op.tensors, *op.outputs) for word in op.shapes[name].split()}
    scalars |= {name: sizes[letter] for letter, name in op.sized.items() if letter not in seen}
    sized = {letter: name for letter, name in op.sized.items() if letter in seen}
    bounded = tuple(letter for letter, dim in cases.dims.items() if dim.at_most)
    # What users call may make another shape of the result (a mean): nothing is declared of that one.
    shapes = op.shapes if op.public is None else {name: text for name, text in op.shapes.items() if name in op.tensors}
    return Chain(
        op.name, _called(op), tuple(spellings), shapes, len(op.outputs), sizes, scalars, integers=op.indexes, bounded=bounded,
        optional=op.optional, sized=sized, choice=op.choice is not None,
    )  # fmt: skip


def _called(op: Op) -> Callable[..., Any]:
    """What users call, in plain torch."""
    public, names = op.public, list(op.arguments)
    if public is None:
        return op.reference

    def raw(*args: Any, **kwargs: Any) -> Any:
        results = op.reference(**{**dict(zip(names, args)), **kwargs})
        results = (results if isinstance(results, tuple) else (results,))[: len(op.outputs)]
        return results[0] if len(results) == 1 else results

    parameters = op.signature.parameters

    def reference(*args: Any) -> Any:
        named = dict(zip(parameters, args))
        behind = {n: v for n, v in named.items() if parameters[n].kind is inspect.Parameter.KEYWORD_ONLY}
        return public(raw, *(v for n, v in named.items() if n not in behind), **behind)

    reference.__signature__ = op.signature  # type: ignore[attr-defined]
    return reference


def _size(dims: Mapping[str, Any], letter: str, at: int) -> int:
    """A small size that the declaration allows; different letters get different ones where they may."""
    dim = dims[letter]
    if dim.at_most:
        return _size(dims, dim.at_most, list(dims).index(dim.at_most))
    multiple = dim.multiple if isinstance(dim.multiple, int) else _size(dims, dim.multiple, list(dims).index(dim.multiple))
    return int(multiple) * 2 * (at + 2)


def patterns(grad: bool) -> list[Pattern]:
    """Every spelling as a graph, traced with or without autograd, as the model was: torch takes other ways."""
    found: list[Pattern] = []
    for chain in chains():
        for sized, (spelling, scalars) in itertools.product(_halved(chain), chain.spellings):
            with torch.set_grad_enabled(grad):
                pattern = _trace(sized, spelling, scalars, flat=False) or _trace(sized, spelling, scalars, flat=True)
            if pattern is not None and not any(_equal(pattern, old) for old in found):
                found.append(pattern)
    return found


def _halved(chain: Chain) -> list[Chain]:
    """The chain, and with a letter that is at most another's at about half its size: a part of the elements is computed then."""
    if not chain.bounded:
        return [chain]
    return [chain, replace(chain, sizes={k: v // 4 * 2 if k in chain.bounded else v for k, v in chain.sizes.items()})]


def _equal(a: Pattern, b: Pattern) -> bool:
    return a.chain.reference is b.chain.reference and dict(a.scalars) == dict(b.scalars) and form(a) == form(b)


def form(pattern: Pattern) -> tuple[str, ...]:
    """The pattern as text, one per output: equal for equal graphs."""

    def text(value: int) -> str:
        root = pattern.graph.root(value)
        node = pattern.graph.nodes.get(root)
        if node is None:
            return pattern.places.get(root, "?")
        parts = [text(c.number) if isinstance(c, Ref) else "c" for c in node.children]
        return f"{node.op}({', '.join(sorted(parts) if node.op in canonical.COMMUTATIVE else parts)})"

    return tuple(text(value) for value in pattern.outputs)


def _trace(chain: Chain, spelling: Callable[..., Any], scalars: Mapping[str, Any], flat: bool) -> Pattern | None:
    """The spelling run on a small example; None where it does not take it, or is a single operator, which is no chain.

    flat: rows have one dimension, as some spellings want.
    """
    names = list(inspect.signature(spelling).parameters)
    session = Session("pattern")
    free = torch.Generator().manual_seed(0)
    values: dict[str, Any] = {}
    marks: dict[float, str] = {}
    for name in names:
        if name in chain.shapes:
            values[name] = example(chain, name, free, flat)
        elif name in chain.sized.values():
            values[name] = next(chain.sizes[letter] for letter, argument in chain.sized.items() if argument == name)
        elif isinstance(chain.scalars.get(name), float):
            mark = MARKS[len(marks)]
            marks[mark], values[name] = name, mark
        elif type(number := scalars.get(name, chain.scalars.get(name))) is int:
            # No number is free to be a mark here: it has to be a size that nothing else has.
            marks[float(number)], values[name] = name, number
        elif name in chain.scalars:
            values[name] = scalars.get(name, chain.scalars[name])
        else:
            return None
    tensors = [v for v in values.values() if isinstance(v, Tensor)]
    try:
        with warnings.catch_warnings(), session.running():
            warnings.simplefilter("ignore")  # a spelling's own affair, and no word to the model's author
            session.begin(tensors, keep=False)
            places = {session.recorder.number(v): n for n, v in values.items() if isinstance(v, Tensor)}
            result = spelling(*values.values())
            results = result if isinstance(result, tuple) else (result,)
            outputs = tuple(session.recorder.number(t) for t in results if isinstance(t, Tensor))
            session.end()
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    graph = canonical.build(session.capture.graph)
    if len({node.calls for node in graph.nodes.values()}) < 2:
        return None
    return Pattern(chain, spelling.__name__, scalars, graph, outputs[: chain.outputs], places, marks)


def example(chain: Chain, name: str, generator: torch.Generator, flat: bool = False) -> Tensor:
    """A small random tensor for an argument, by its shape in letters."""
    shape: list[int] = []
    for word in chain.shapes[name].split():
        if word.startswith("*"):
            shape += [chain.sizes[word[1:]]] if flat else [2, max(1, chain.sizes[word[1:]] // 2)]
        else:
            shape.append(chain.sizes[word.partition("|")[0]])
    if name in chain.integers:
        return torch.randint(0, chain.sizes[chain.integers[name]], shape, generator=generator)
    return torch.randn(shape, generator=generator, requires_grad=torch.is_grad_enabled())


def unify(text: str, shape: tuple[int, ...], sizes: dict[str, int]) -> dict[str, int] | None:
    """The letters' sizes after a tensor of this shape, or None where it does not fit."""
    words = text.split()
    at = next((i for i, word in enumerate(words) if word.startswith("*")), None)
    if at is not None:  # its dimensions as one
        several = len(shape) - len(words) + 1
        if several < 0:
            return None
        shape = (*shape[:at], math.prod(shape[at : at + several]), *shape[at + several :])
    if len(shape) != len(words):
        return None
    result = dict(sizes)
    for word, size in zip((word.removeprefix("*") for word in words), shape):
        letter, _, one = word.partition("|")
        if one and size == 1:
            continue
        if result.setdefault(letter, size) != size:
            return None
    return result
