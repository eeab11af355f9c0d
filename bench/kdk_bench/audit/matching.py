"""Finds formulas in a recorded run, and confirms each on the tensors that the model had."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kdk_bench.audit import canonical
from kdk_bench.audit.chains import Chain, Pattern, form, patterns, unify
from kdk_bench.audit.trace import Call, Capture, Ref

FINE, COARSE = 2e-5, 2.0**-4
TRIES = 256


@dataclass
class Found:
    """Where a pattern lies in the run. values: pattern's value -> the run's; bound: argument -> the run's values that it was read
    as, nearest first; scalars: argument -> number; calls: every call that the operator would replace."""

    pattern: Pattern
    values: dict[int, int] = field(default_factory=dict)
    bound: dict[str, list[int]] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    calls: set[int] = field(default_factory=set)

    def copy(self) -> Found:
        bound = {name: list(values) for name, values in self.bound.items()}
        return Found(self.pattern, dict(self.values), bound, dict(self.scalars), set(self.calls))


@dataclass(frozen=True)
class Input:
    """A value of the run as an operator would be given it. change: views that bring it into the declared layout."""

    value: int
    change: str = ""

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape after the change, or None where it cannot be made."""
        for step in self.change.split():
            if step == "swap" and len(shape) == 4:
                shape = (shape[0], shape[2], shape[1], shape[3])
            elif step == "squeeze" and len(shape) == 4 and 1 in shape[1:3]:
                shape = (shape[0], shape[1] * shape[2], shape[3])
            elif step == "batch" and len(shape) == 2:
                shape = (1, *shape)
            elif step in ("double", "repeat") and shape:
                shape = (*shape[:-1], 2 * shape[-1])
            else:
                return None
        return shape

    def of(self, tensor: Tensor) -> Tensor:
        for step in self.change.split():
            if step == "swap":
                tensor = tensor.transpose(1, 2)
            elif step == "squeeze":
                tensor = tensor.squeeze(1 if tensor.shape[1] == 1 else 2)
            elif step == "batch":
                tensor = tensor.unsqueeze(0)
            elif step == "double":
                tensor = torch.cat((tensor, tensor), -1)
            else:
                tensor = tensor.repeat_interleave(2, -1)
        return tensor


# Heads before or behind the sequence; a table broadcast or without a batch, or half of one whose halves, or neighbours, are equal.
CHANGES = ("", "swap", "squeeze", "double", "repeat", "squeeze double", "squeeze repeat", "batch", "batch double", "batch repeat")


@dataclass(frozen=True)
class Hit:
    """A formula found in the run. confirmed: the reference gave the model's own result on the model's own tensors; else `reason`."""

    chain: Chain
    spelling: str
    calls: tuple[Call, ...]
    inputs: Mapping[str, Input]
    scalars: Mapping[str, Any]
    outputs: tuple[int, ...]
    sizes: Mapping[str, int]
    confirmed: bool
    reason: str = ""

    @property
    def module(self) -> str:
        return self.calls[0].module if len({c.module for c in self.calls}) == 1 else self.calls[-1].module

    @property
    def line(self) -> str:
        return self.calls[-1].line


def find(capture: Capture, grad: bool, known: Sequence[Hit] = ()) -> list[Hit]:
    """Every formula in the first step's forward, the largest first where several overlap. What the numbers contradict is left out.

    known: hits of a smaller run of the same model; then this run has no numbers, and what was confirmed there in the same place,
    layers' numbers aside, holds here.
    """
    places = {(hit.chain.name, _layer(hit.module)) for hit in known if hit.confirmed}
    graph = canonical.build(capture.graph)
    candidates: list[Found] = []
    seen: set[tuple[Any, ...]] = set()
    for pattern in patterns(grad):
        if not _may_occur(pattern, graph):
            continue
        for found in _occurrences(pattern, graph):
            key = (pattern.chain.reference, tuple(sorted(pattern.scalars.items())), form(pattern), tuple(sorted(found.calls)))
            if key not in seen:
                seen.add(key)
                candidates.append(found)
    # Of equally large ones those whose calls lie together: a query and its key, not the keys of two layers.
    candidates.sort(key=lambda f: (-len(f.calls), max(f.calls) - min(f.calls)))
    hits: list[Hit] = []
    taken: set[int] = set()
    by_number = {call.number: call for call in capture.graph}
    for found in candidates:
        if found.calls & taken:
            continue
        hit = _carried(found, capture, by_number, places) if known else _confirm(found, capture, graph, by_number)
        if hit is not None:
            taken |= found.calls
            hits.append(hit)
    return sorted(hits, key=lambda h: h.calls[0].number)


def _may_occur(pattern: Pattern, graph: canonical.Graph) -> bool:
    return all(op in graph.by_op for op in pattern.graph.by_op)


def _occurrences(pattern: Pattern, graph: canonical.Graph) -> Iterator[Found]:
    """All outputs that are part of one graph are found from the first; the others are searched for with what is bound."""
    first = pattern.graph.root(pattern.outputs[0])
    node = pattern.graph.nodes.get(first)
    if node is None:
        return
    for value in graph.by_op.get(node.op, ()):
        for found in itertools.islice(_match(first, value, Found(pattern), graph), 4):
            yield from itertools.islice(_others(pattern.outputs[1:], found, graph), 2)


def _others(outputs: Sequence[int], found: Found, graph: canonical.Graph) -> Iterator[Found]:
    if not outputs:
        yield found
        return
    root = found.pattern.graph.root(outputs[0])
    if root in found.values:
        yield from _others(outputs[1:], found, graph)
        return
    node = found.pattern.graph.nodes.get(root)
    extended = False
    near = min(found.calls)
    nearest = sorted(graph.by_op.get(node.op, ()) if node else (), key=lambda v: abs(graph.nodes[v].calls[-1] - near))
    for value in nearest:
        if graph.nodes[value].calls[-1] in found.calls:
            continue
        for more in itertools.islice(_match(root, value, found.copy(), graph), 1):
            if len({graph.made_by[v].module for v in more.values.values() if v in graph.made_by}) <= 2:
                extended = True
                yield from _others(outputs[1:], more, graph)
    if not extended:
        yield from _others(outputs[1:], found, graph)


def _match(pattern_value: int, value: int, found: Found, graph: canonical.Graph) -> Iterator[Found]:
    """Every way in which the pattern's value can be this value of the run."""
    mine = found.pattern.graph
    at = mine.root(pattern_value)
    root = graph.root(value)
    seen = _read_off_view(pattern_value, value, found, graph)
    if seen is None:
        return
    found = seen
    if at in found.pattern.places:
        name = found.pattern.places[at]
        before = found.bound.get(name)
        if (before and graph.root(before[0]) != root) or _is_mask(root, graph):
            return
        result = found.copy()
        for link in graph.chain(value):
            if link not in result.bound.setdefault(name, []):
                result.bound[name].append(link)
        yield result
        return
    if at in found.values:
        if found.values[at] == root:
            yield found
        return
    wanted, node = mine.nodes.get(at), graph.nodes.get(root)
    if wanted is None:  # made inside the spelling without an argument: a constant tensor
        yield found
        return
    if node is None or node.op != wanted.op or len(node.children) < len(wanted.children):
        return
    result = found.copy()
    result.values[at] = root
    result.calls |= set(node.calls) | _between(value, root, graph)
    yield from _children(wanted, node, result, graph)


def _read_off_view(pattern_value: int, value: int, found: Found, graph: canonical.Graph) -> Found | None:
    """With the arguments that stand in the shape of a view, as a number of groups does, which shows nowhere else. None where two
    views disagree."""
    pattern = found.pattern
    mine, theirs = pattern.graph.shapes.get(pattern_value, ()), graph.shapes.get(value, ())
    before = pattern.graph.shapes.get(pattern.graph.root(pattern_value), ())
    for place, size in enumerate(reversed(mine), 1):
        name = pattern.marks.get(float(size)) if size not in before else None
        if name is None:
            continue
        if place > len(theirs) or found.scalars.get(name, theirs[-place]) != theirs[-place]:
            return None
        found = found.copy()
        found.scalars[name] = theirs[-place]
    return found


def _is_mask(value: int, graph: canonical.Graph) -> bool:
    """Drawn at random, and scaled: a dropout's mask multiplies what it is applied to as a gate would."""
    node = graph.node(value)
    while node is not None and node.op != "bernoulli":
        refs = [child for child in node.children if isinstance(child, Ref)]
        node = graph.node(refs[0].number) if node.op == "mul" and len(refs) == 1 else None
    return node is not None


def _between(value: int, root: int, graph: canonical.Graph) -> set[int]:
    """The casts and copies between a node and where it is read."""
    return {graph.made_by[v].number for v in graph.chain(value) if v != root and v in graph.made_by and not graph.made_by[v].view}


def _children(wanted: canonical.Node, node: canonical.Node, found: Found, graph: canonical.Graph) -> Iterator[Found]:
    count = len(wanted.children)
    orders: Sequence[Sequence[Any]] = [node.children[:count]]
    if wanted.op in canonical.COMMUTATIVE and count == 2:
        orders = [node.children[:2], node.children[1::-1]]
    for order in orders:
        yield from _pairwise(list(zip(wanted.children, order)), found, graph)


def _pairwise(pairs: list[tuple[Any, Any]], found: Found, graph: canonical.Graph) -> Iterator[Found]:
    if not pairs:
        yield found
        return
    (mine, theirs), rest = pairs[0], pairs[1:]
    if isinstance(mine, canonical.Const):
        if not isinstance(theirs, canonical.Const):
            return
        # Within float32's rounding: torch's composites round a number on its way.
        name = next((n for mark, n in found.pattern.marks.items() if abs(mine.value - mark) < 1e-6 * mark), "")
        if name:
            found = found.copy()
            usual = found.pattern.scalars.get(name, found.pattern.chain.scalars[name])
            found.scalars[name] = type(usual)(theirs.value)
        yield from _pairwise(rest, found, graph)
    elif isinstance(theirs, Ref):
        for more in _match(mine.number, theirs.number, found, graph):
            yield from _pairwise(rest, more, graph)


def _layer(module: str) -> str:
    return re.sub(r"\d+", "*", module)


def _carried(found: Found, capture: Capture, calls: Mapping[int, Call], places: set[tuple[str, str]]) -> Hit | None:
    """The hit in a run without numbers, where a smaller run confirmed it."""
    for inputs, sizes in _bindings(found, capture):
        outputs = tuple(found.values.get(found.pattern.graph.root(v), -1) for v in found.pattern.outputs)
        mine = tuple(calls[n] for n in sorted(found.calls))
        hit = Hit(found.pattern.chain, found.pattern.spelling, mine, inputs, found.scalars, outputs, sizes, True)
        return hit if (hit.chain.name, _layer(hit.module)) in places else None
    return None


def _confirm(found: Found, capture: Capture, graph: canonical.Graph, calls: Mapping[int, Call]) -> Hit | None:
    """The hit, or None where the numbers speak against it."""
    chain = found.pattern.chain
    scalars = {**chain.scalars, **found.pattern.scalars, **found.scalars}
    outputs = tuple(found.values.get(found.pattern.graph.root(v), -1) for v in found.pattern.outputs)
    mine = tuple(calls[n] for n in sorted(found.calls))
    reason = ""
    for inputs, sizes in itertools.islice(_bindings(found, capture), TRIES):
        scalars |= {argument: sizes[letter] for letter, argument in chain.sized.items() if letter in sizes}
        verdict = _agrees(chain, inputs, scalars, outputs, capture)
        if verdict is True:
            return Hit(chain, found.pattern.spelling, mine, inputs, scalars, outputs, sizes, True)
        if isinstance(verdict, str) and not reason:
            reason, first = verdict, (inputs, sizes)
    if reason:
        return Hit(chain, found.pattern.spelling, mine, first[0], scalars, outputs, first[1], False, reason)
    return None


def _bindings(found: Found, capture: Capture) -> Iterator[tuple[dict[str, Input], dict[str, int]]]:
    """Assignments of values to the tensor arguments whose shapes fit the declaration's letters; the value before a cast first."""
    chain = found.pattern.chain
    names = [n for n in chain.arguments if n in chain.shapes and (n in found.bound or n not in chain.optional)]
    everything = list(dict.fromkeys(v for values in found.bound.values() for v in values))

    def assign(at: int, inputs: dict[str, Input], sizes: dict[str, int]) -> Iterator[tuple[dict[str, Input], dict[str, int]]]:
        if at == len(names):
            fitted = _with_outputs(found, sizes, capture)
            if fitted is not None:
                yield inputs, fitted
            return
        name = names[at]
        options = list(reversed(found.bound[name])) if name in found.bound else everything
        options.sort(key=lambda value: -math.prod(capture.metas[value].shape))  # a whole before its slices
        for change, value in itertools.product(CHANGES, options):
            given = Input(value, change)
            shape = given.shape(capture.metas[value].shape)
            fitting = unify(chain.shapes[name], shape, sizes) if shape is not None else None
            if fitting is not None:
                yield from assign(at + 1, {**inputs, name: given}, fitting)

    yield from assign(0, {}, {})


def _with_outputs(found: Found, sizes: Mapping[str, int], capture: Capture) -> dict[str, int] | None:
    """The sizes, with those that an argument says (a k) read off the outputs; None unless every output that was found has as many
    elements as its letters."""
    chain, result = found.pattern.chain, dict(sizes)
    outputs = [text for name, text in chain.shapes.items() if name not in chain.arguments][: len(found.pattern.outputs)]
    for text, value in zip(outputs, found.pattern.outputs):
        place = found.values.get(found.pattern.graph.root(value), -1)
        if place < 0:
            continue
        elements = math.prod(capture.metas[place].shape) * (2 if capture.metas[place].dtype.startswith("complex") else 1)
        letters = [word.strip("*").partition("|")[0] for word in text.split()]
        known = math.prod(result.get(letter, 1) for letter in letters)
        unknown = [letter for letter in letters if letter in chain.sized and letter not in result]
        if len(unknown) == 1 and known:
            result[unknown[0]] = elements // known
            known *= result[unknown[0]]
        if known != elements:
            return None
    return result


def _agrees(chain: Chain, inputs: Mapping[str, Input], scalars: Mapping[str, Any], outputs: Sequence[int], capture: Capture) -> bool | str:
    """Whether the reference gives the model's results on the model's tensors; why that cannot be said."""
    known = {}
    for value in (*(i.value for i in inputs.values()), *(v for v in outputs if v >= 0)):
        tensor, version = capture.tensors.get(value, (None, 0))
        if tensor is None:
            return "its tensors were not kept: the run is larger than what is kept"
        if (0 if tensor.is_inference() else tensor._version) != version:
            return "its tensors were changed in place afterwards"
        known[value] = tensor.detach()
    arguments = chain.values({**scalars, **{n: given.of(known[given.value]) for n, given in inputs.items()}})
    try:
        with torch.no_grad():
            result = chain.reference(*arguments)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    results = result if isinstance(result, tuple) else (result,)
    pairs = [(known[v], r, number) for number, (v, r) in enumerate(zip(outputs, results)) if v >= 0]
    return bool(pairs) and all(_close(e, r) or (chain.in_any_order(i) and _close(_sorted(e), _sorted(r))) for e, r, i in pairs)


def _sorted(tensor: Tensor) -> Tensor:
    return tensor.sort(-1)[0]


def _close(expected: Tensor, got: Tensor) -> bool:
    if expected.is_complex() and not got.is_complex():  # a view of pairs is transparent
        expected = torch.view_as_real(expected).flatten(-2)
    if expected.numel() != got.numel() or expected.is_complex() != got.is_complex():
        return False
    tolerance = FINE if min(expected.element_size(), got.element_size()) >= 4 else COARSE
    e = expected.double() if not expected.is_complex() else expected
    got = got.to(e.dtype)  # 8-bit floats have no arithmetic
    # Equal shapes prove no order: as many heads as steps look alike.
    orders = [tuple(range(got.dim()))] if got.dim() > 4 else list(itertools.permutations(range(got.dim())))
    pairs_apart = (
        [got.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)] if got.dim() and got.shape[-1] % 2 == 0 and got.shape[-1] else []
    )
    for order, result in itertools.product(orders, [got, *pairs_apart]):
        g = result.permute(order)
        if g.shape != e.shape:
            if order != tuple(range(got.dim())):
                continue
            g = g.reshape(e.shape)
        error = (g - e).abs()
        size = e.abs().amax(-1, keepdim=True) if e.dim() else e.abs()
        finite = torch.isfinite(e) & torch.isfinite(g)
        if bool(((error <= tolerance * size + 1e-30) | ~finite).all()) and bool(finite.any()):
            return True
    return False
