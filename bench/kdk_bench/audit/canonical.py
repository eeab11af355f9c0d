"""A recorded run as a graph in which different spellings of one formula look alike.

Views, casts and copies are transparent: an edge goes to the value behind them. Equal formulas get one form: x*x is square(x),
a/sqrt(b) is a*rsqrt(b), x*sigmoid(x) is silu(x), a-b is a+neg(b), x@w+b is add(mm(x, w), b).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kdk_bench.audit.trace import Call, Ref

# Give back their first argument's values in another shape, dtype, order or place; slices too, since what a slice is taken of
# says more than that it is one. What is confused by that falls in the numerical confirmation.
TRANSPARENT = frozenset(
    "aten::" + name
    for name in (
        "_to_copy", "clone", "contiguous", "view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "t", "transpose",
        "permute", "slice", "select", "split", "split_with_sizes", "chunk", "detach", "alias", "as_strided", "unbind", "narrow",
        "_reshape_alias", "lift_fresh", "unfold", "view_as_real", "view_as_complex", "repeat", "roll", "diagonal", "flip",
    )
)  # fmt: skip
COMMUTATIVE = frozenset(("add", "mul", "maximum", "minimum"))
SAME = {"stack": "cat", "addmm": "addmm", "bmm": "mm", "baddbmm": "addmm", "linear": "mm", "matmul": "mm", "_safe_softmax": "_softmax"}


@dataclass(frozen=True)
class Const:
    """A number among the arguments."""

    value: float


@dataclass(frozen=True)
class Node:
    """op: canonical name. children: values (Ref) and numbers (Const), in order. calls: the calls it stands for."""

    op: str
    children: tuple[Any, ...]
    calls: tuple[int, ...]


@dataclass
class Graph:
    """nodes: value -> the node that makes it. source: value of a transparent call -> the value it was made of. shapes: of the values
    that calls read."""

    nodes: dict[int, Node] = field(default_factory=dict)
    source: dict[int, int] = field(default_factory=dict)
    made_by: dict[int, Call] = field(default_factory=dict)
    by_op: dict[str, list[int]] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def root(self, value: int) -> int:
        """The value behind views, casts and copies."""
        while value in self.source:
            value = self.source[value]
        return value

    def chain(self, value: int) -> Iterator[int]:
        """A value and those behind it, nearest first."""
        yield value
        while value in self.source:
            value = self.source[value]
            yield value

    def node(self, value: int) -> Node | None:
        return self.nodes.get(self.root(value))


def build(calls: Iterable[Call]) -> Graph:
    """The graph of the forward calls."""
    graph = Graph()
    for call in calls:
        if call.phase != "forward" or not call.outputs:
            continue
        for value in call.outputs:
            graph.made_by[value] = call
        inputs = list(call.inputs())
        graph.shapes.update((value, meta.shape) for value, meta in zip(inputs, call.metas))
        # A value that is written in place is a new one with the same tensor.
        if call.op in TRANSPARENT and inputs:
            for value in call.outputs:
                if value != inputs[0]:
                    graph.source[value] = inputs[0]
            continue
        if call.op == "aten::cat" and len(parts := _parts(call)) == 1:
            graph.source[call.outputs[0]] = parts[0].number
            continue
        name = call.op.partition("::")[2]
        name = name[:-1] if name.endswith("_") and not name.startswith("__") else name
        for value in call.outputs:
            node = _canonical(graph, Node(SAME.get(name, name), _children(call), (call.number,)), call)
            graph.nodes[value] = node
    for value, node in graph.nodes.items():
        graph.by_op.setdefault(node.op, []).append(value)
    return graph


def _parts(call: Call) -> list[Ref]:
    """What a cat puts together, without empty parts."""
    refs = [v for v in call.args[0] if isinstance(v, Ref)]
    return [ref for ref, meta in zip(refs, call.metas) if 0 not in meta.shape]


def _children(call: Call) -> tuple[Any, ...]:
    found: list[Any] = []
    if call.op in ("aten::cat", "aten::stack"):
        return tuple(_parts(call))
    for item in call.args:
        found += [v for v in item if isinstance(v, Ref)] if isinstance(item, list | tuple) else [item]
    return tuple(_child(item) for item in found if isinstance(item, Ref | int | float) and not isinstance(item, bool))


def _child(item: Any) -> Any:
    return item if isinstance(item, Ref) else Const(float(item))


def _canonical(graph: Graph, node: Node, call: Call) -> Node:
    op, children, calls = node.op, node.children, node.calls
    if op in ("add", "sub", "rsub", "mul", "div"):
        children = children[:2]
    if op == "rsub":
        op, children = "sub", children[::-1]
    if op == "pow" and len(children) == 2 and isinstance(children[1], Const):
        power = children[1].value
        if power == 2:
            return Node("square", children[:1], calls)
        if power == -0.5:
            return Node("rsqrt", children[:1], calls)
        if power == 0.5:
            return Node("sqrt", children[:1], calls)
    if op == "addmm":
        return Node("add", (children[0], _inner(graph, call, Node("mm", children[1:3], calls))), calls)
    if op == "mm":
        return Node("mm", children[:2], calls)
    if op == "reciprocal":
        below = _producer(graph, children[0])
        if below and below.op == "sqrt":
            return Node("rsqrt", below.children, (*below.calls, *calls))
        return Node("div", (Const(1.0), children[0]), calls)
    if op == "div" and len(children) == 2:
        return _division(graph, children, calls, call)
    if op == "sub" and len(children) == 2:
        left, right = children
        if isinstance(right, Const):
            return Node("add", (left, Const(-right.value)), calls)
        return Node("add", (left, _inner(graph, call, Node("neg", (right,), calls))), calls)
    if op == "mul" and len(children) == 2:
        return _product(graph, children, calls)
    if op in ("mean", "sum", "amax", "amin", "_softmax", "_log_softmax", "argmax", "cumsum", "sort", "gelu", "silu", "sigmoid"):
        children = children[:1]
    if op == "topk":
        children = children[:2]
    return Node(op, children, calls)


def _division(graph: Graph, children: tuple[Any, ...], calls: tuple[int, ...], call: Call) -> Node:
    left, right = children
    if isinstance(right, Const):
        return Node("mul", (left, Const(1.0 / right.value if right.value else float("inf"))), calls)
    below = _producer(graph, right)
    if below and below.op == "sqrt":
        root = Node("rsqrt", below.children, (*below.calls, *calls))
        if isinstance(left, Const):
            return root
        return Node("mul", (left, _inner(graph, call, root)), calls)
    return Node("div", children, calls)


def _product(graph: Graph, children: tuple[Any, ...], calls: tuple[int, ...]) -> Node:
    left, right = children
    if left == right and isinstance(left, Ref):
        return Node("square", (left,), calls)
    for one, other in ((left, right), (right, left)):
        below = _producer(graph, one)
        if below and below.op == "sigmoid" and isinstance(other, Ref) and graph.root(below.children[0].number) == graph.root(other.number):
            return Node("silu", (other,), (*below.calls, *calls))
    return Node("mul", children, calls)


def _producer(graph: Graph, child: Any) -> Node | None:
    return graph.node(child.number) if isinstance(child, Ref) else None


def _inner(graph: Graph, call: Call, node: Node) -> Ref:
    """A value of its own for the inner part of a call that stands for two nodes. Negative: no tensor has it."""
    number = -1 - len(graph.nodes) - call.number * 4
    while number in graph.nodes:
        number -= 1
    graph.nodes[number] = node
    return Ref(number)
