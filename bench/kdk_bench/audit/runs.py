"""Formulas that nobody has a name for: runs of element-wise operators, and loops written in Python."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    """A loop in Python whose turns wait for each other. turns: how many; operators: what one turn calls."""

    turns: int
    operators: tuple[str, ...]
    calls: tuple[Call, ...]


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
        result.append(Loop(turns, operators, tuple(c for g in groups for c in g)))
    return result


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


def text(value: Any, names: dict[int, str]) -> str:
    if isinstance(value, Ref):
        return names.get(value.number, f"x{value.number}")
    if isinstance(value, list | tuple):
        return f"[{', '.join(text(v, names) for v in value)}]"
    return repr(value)
