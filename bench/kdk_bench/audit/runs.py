"""Formulas that nobody has a name for: runs of element-wise operators, and loops written in Python."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kdk_bench.audit import canonical
from kdk_bench.audit.trace import Call, Capture, Ref

NAMES = """add sub rsub mul div neg exp expm1 log log1p sqrt rsqrt square pow abs sigmoid tanh silu gelu relu softplus erf sin cos clamp
clamp_min clamp_max minimum maximum where reciprocal leaky_relu elu hardtanh mish addcmul addcdiv sign log2 exp2 atan lerp"""
ELEMENTWISE = frozenset("aten::" + name for name in NAMES.split())
LEAST = 3  # operators: two in a row are not worth a kernel
TURNS = 8


@dataclass(frozen=True)
class Run:
    """Element-wise operators with one result. inputs: the values it reads, in order."""

    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    output: int


def elementwise(capture: Capture, taken: set[int]) -> list[Run]:
    """Runs in the first step's forward, without the calls that known formulas have taken. What is read elsewhere too ends a run."""
    calls = {c.outputs[0]: c for c in capture.graph if c.phase == "forward" and len(c.outputs) == 1 and not c.view}
    readers: dict[int, list[Call]] = {}
    for call in capture.graph:
        for value in set(call.inputs()):
            if call.phase == "forward" and call.op not in ("aten::detach", "aten::alias"):
                readers.setdefault(value, []).append(call)
    used: set[int] = set(taken)
    found = []
    for call in sorted(calls.values(), key=lambda c: -c.number):
        if call.number in used or not _fits(call, capture):
            continue
        mine = {call.outputs[0]: call}
        todo = list(call.inputs())
        while todo:
            value = todo.pop()
            before = calls.get(value)
            if before is None or value in mine or before.number in used or not _fits(before, capture):
                continue
            same = capture.metas[value].shape == capture.metas[call.outputs[0]].shape and before.module == call.module
            if same and all(r.outputs and r.outputs[0] in mine for r in readers.get(value, ())):
                mine[value] = before
                todo += list(before.inputs())
        if len(mine) >= LEAST:
            used |= {c.number for c in mine.values()}
            ordered = tuple(sorted(mine.values(), key=lambda c: c.number))
            inputs = tuple(dict.fromkeys(v for c in ordered for v in c.inputs() if v not in mine))
            found.append(Run(ordered, inputs, call.outputs[0]))
    return sorted(found, key=lambda r: r.calls[0].number)


def _fits(call: Call, capture: Capture) -> bool:
    """Element-wise, on floating-point numbers, and more than a scalar."""
    if call.op not in ELEMENTWISE:
        return False
    meta = capture.metas[call.outputs[0]]
    return len(meta.shape) > 0 and meta.dtype in ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Loop:
    """A loop in Python whose turns wait for each other. turns: how many; operators: what one turn calls. linear: it is
    h = a * h + b, and the captured tensors are so."""

    turns: int
    operators: tuple[str, ...]
    calls: tuple[Call, ...]
    linear: bool = False


def loops(capture: Capture) -> list[Loop]:
    """Lines of one module that ran again and again, each time on what they made the time before."""
    graph = canonical.build(capture.graph)
    lines: dict[tuple[str, str, str], list[Call]] = {}
    for call in capture.graph:
        if call.phase == "forward" and not call.view and call.line:
            lines.setdefault((call.module, call.line, call.op), []).append(call)
    found: dict[str, list[list[Call]]] = {}
    for (module, _, _), calls in lines.items():
        if len(calls) >= TURNS and _sequential(calls, graph):
            found.setdefault(module, []).append(calls)
    result = []
    for groups in found.values():
        turns = min(len(g) for g in groups)
        operators = tuple(dict.fromkeys(g[0].op for g in groups))
        result.append(Loop(turns, operators, tuple(c for g in groups for c in g), _is_linear(groups, graph, capture)))
    return result


def _is_linear(groups: Sequence[Sequence[Call]], graph: canonical.Graph, capture: Capture) -> bool:
    """One product and one sum a turn, the product with the sum of the turn before; the captured states are checked to follow it."""
    products = [g for g in groups if g[0].op == "aten::mul"]
    sums = [g for g in groups if g[0].op == "aten::add"]
    if len(groups) != 2 or len(products) != 1 or len(sums) != 1 or len(products[0]) != len(sums[0]):
        return False
    kept = {number: tensor for number, (tensor, version) in capture.tensors.items() if tensor.is_inference() or tensor._version == version}
    states = [c.outputs[0] for c in sums[0]]
    factors = [_other(c, before, graph) for c, before in zip(products[0][1:], states)]
    terms = [_other(c, product.outputs[0], graph) for c, product in zip(sums[0][1:], products[0][1:])]
    turns = list(zip(factors, states, terms, states[1:]))
    if any(value not in kept for turn in turns for value in turn):
        return False
    with torch.no_grad():
        return all(torch.allclose(kept[a] * kept[h] + kept[b], kept[then], rtol=1e-3) for a, h, b, then in turns)  # type: ignore[index]


def _other(call: Call, value: int, graph: canonical.Graph) -> int | None:
    """The operand of a call of two that is not this value, views aside."""
    operands = list(call.inputs())
    others = [n for n in operands if graph.root(n) != graph.root(value)]
    return others[0] if len(operands) == 2 and len(others) == 1 else None


def _sequential(calls: Sequence[Call], graph: canonical.Graph) -> bool:
    """Each of nearly all calls reads, through a few operators, what the one before it made."""
    linked = sum(_reaches(after, {graph.root(v) for v in before.outputs}, graph) for before, after in itertools.pairwise(calls))
    return linked >= 0.8 * (len(calls) - 1)


def _reaches(call: Call, wanted: set[int], graph: canonical.Graph, depth: int = 5) -> bool:
    front = {graph.root(v) for v in call.inputs()}
    for _ in range(depth):
        if front & wanted:
            return True
        front = {graph.root(c.number) for v in front if v in graph.nodes for c in graph.nodes[v].children if isinstance(c, Ref)}
    return False


def program(calls: Sequence[Call], inputs: Sequence[int], outputs: Sequence[int], capture: Capture) -> dict[str, Any]:
    """Calls as text that `kdk new` writes as a function: {"inputs": [[name, tensor]], "steps": [[name, call]], "outputs": [...]}."""
    names = {value: f"x{i}" for i, value in enumerate(inputs)}
    head = [[names[v], str(capture.metas[v])] for v in inputs]
    steps = []
    for call in calls:
        if call.op == "aten::_to_copy":  # the dtype is the reference's own affair
            names[call.outputs[0]] = text(next(iter(call.args)), names)
            continue
        arguments = [text(a, names) for a in call.args]
        arguments += [f"{k}={text(v, names)}" for k, v in call.kwargs.items()]
        name = f"v{call.number}"
        steps.append([name, f"torch.ops.{call.op.replace('::', '.')}.{call.overload}({', '.join(arguments)})"])
        for value in call.outputs:
            names[value] = name
    return {"inputs": head, "steps": steps, "outputs": [names[v] for v in outputs if v in names]}


def program_of(call: Call) -> dict[str, Any]:
    """One call as such a program; {} where an argument cannot be written down, or where it changes an argument in place."""
    numbers = list(call.inputs())
    metas = dict(zip(numbers, call.metas))
    names = {number: f"x{i}" for i, number in enumerate(metas)}
    if not metas or not call.outputs or set(call.outputs) & set(numbers) or call.op.endswith("_") or len(numbers) != len(call.metas):
        return {}
    arguments = [text(a, names) for a in call.args] + [f"{k}={text(v, names)}" for k, v in call.kwargs.items()]
    if any("<" in a or "device(" in a for a in arguments):
        return {}
    outputs = ["v0"] if len(call.outputs) == 1 else [f"v0[{i}]" for i in range(len(call.outputs))]
    called = f"torch.ops.{call.op.replace('::', '.')}.{call.overload}({', '.join(arguments)})"
    return {"inputs": [[names[n], str(m)] for n, m in metas.items()], "steps": [["v0", called]], "outputs": outputs}


def text(value: Any, names: dict[int, str]) -> str:
    if isinstance(value, Ref):
        return names.get(value.number, f"x{value.number}")
    if isinstance(value, list | tuple):
        return f"[{', '.join(text(v, names) for v in value)}]"
    return repr(value) if not isinstance(value, float) or math.isfinite(value) else f"float('{value}')"
