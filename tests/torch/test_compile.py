"""torch.compile(fullgraph=True): graphs, dynamic sizes, choices around and inside, never a stale graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.inputs import arguments, cases, results, total
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import kdk
from kdk.torch_library import Operator

pytestmark = pytest.mark.filterwarnings("ignore::kdk.FallbackWarning")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **kwargs: Any) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    """The function and the counter of its graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, **kwargs), counter


def called(counter: CompileCounterWithBackend) -> list[str]:
    """kdk's operators in the last graph, with their `impl`."""
    graph = counter.graphs[-1].graph
    nodes = [n for n in graph.nodes if n.op == "call_function" and "kdk" in str(n.target)]
    return [f"{n.target.__name__}({n.kwargs.get('impl', '')})" for n in nodes]


def test_forward_and_backward(operator: Operator) -> None:
    """As the front door decides: row and element-wise operators are inlined, algorithmic ones keep their operator."""
    op = operator.op
    values, again = arguments(op, grad=True), arguments(op, grad=True)
    function, counter = compiled(lambda v: operator.call(**v))
    for a, b in zip(found := results(function(values)), wanted := results(operator.call(**again))):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
    assert len(called(counter)) == (op.kind == "algorithmic")
    if op.backward is not None:
        total(found).backward()
        total(wanted).backward()
        for name in op.uses:
            torch.testing.assert_close(values[name].grad, again[name].grad)


def test_the_operator_kept(operator: Operator) -> None:
    """The torch operator itself, with gradients for every input alone."""
    op = operator.op
    for names in (tuple(op.uses), *((n,) for n in op.uses)):
        values, again = arguments(op, grad=names), arguments(op, grad=names)
        function, counter = compiled(lambda v: operator.forward(**v)[: len(op.outputs)] if op.saved else operator.forward(**v))
        found, wanted = results(function(values)), results(operator.call(**again))
        assert len(called(counter)) == 1
        if op.backward is not None:
            total(found).backward()
            total(wanted).backward()
            for name in names:
                torch.testing.assert_close(values[name].grad, again[name].grad, rtol=0, atol=0)


def test_one_output_without_a_gradient() -> None:
    function, _ = compiled(lambda a, b: torch.ops.kdk.scale_both(a, b, 2.0))
    for used in (0, 1):
        a, b = torch.randn(3, 4, requires_grad=True), torch.randn(3, requires_grad=True)
        function(a, b)[used].sum().backward()
        torch.testing.assert_close((a, b)[used].grad, torch.full_like((a, b)[used], 2.0))


def test_sizes_change_without_recompiling(operator: Operator) -> None:
    """supports() is asked below the graph, on the real tensors: it guards no dynamic size. Nor do the fakes, of the backward too."""
    op = operator.op
    scalars = {n: v for n, v in arguments(op).items() if n not in op.tensors}
    function, counter = compiled(lambda v: operator.forward(**v, **scalars, impl="torch"))
    letter = next(iter(cases(op).dims))
    for size in (14, 18, 22, 26):  # even: "*N" keeps its two dimensions
        values = {n: v for n, v in arguments(op, grad=True, seed=size, **{letter: size}).items() if n in op.tensors}
        expected = results(operator.forward(**values, **scalars))
        for a, b in zip(results(function(values)), expected):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 2  # as it is for the first size, and dynamic for all others


def test_a_choice_around_the_compiled_function() -> None:
    function, counter = compiled(lambda x: kdk.ops.cube(x) + 1)
    x = torch.randn(3, 4)
    graphs: dict[str, list[str]] = {}
    for choice in ("torch", "reference", "triton", "torch", "reference", "triton"):
        before = counter.frame_count
        with kdk.use(choice):
            function(x)
        if counter.frame_count > before:
            assert choice not in graphs, "a graph of this choice was there"
            graphs[choice] = called(counter)
    assert graphs == {"torch": ["cube.default(torch)"], "reference": [], "triton": ["cube.default(triton)"]}


def test_no_stale_graph() -> None:
    function, _ = compiled(kdk.ops.cube)
    x = torch.randn(3, 4)

    def implementations() -> list[str]:
        with kdk.record() as r:
            function(x)
        return [f"{row.implementation} {row.how}" for row in r.rows if row.how != "refused"]

    assert implementations() == ["torch device"]
    kdk.set_default("reference")
    assert implementations() == ["reference inlined"]
    assert implementations() == []  # compiled before: fused code has no call of its own
    kdk.set_default(cube="torch")
    assert implementations() == ["torch device"]
    with kdk.use(cube="reference"):
        assert implementations() == ["reference inlined"]  # traced again: the choice comes from elsewhere
    kdk.set_default()
    assert implementations() == ["torch device"]


def test_strict_around_the_compiled_function() -> None:
    function, counter = compiled(kdk.ops.cube)
    x = torch.randn(3, 5)
    function(x)
    with kdk.strict(), pytest.raises(kdk.errors.RefusedError, match="5 columns"):
        function(x)
    assert called(counter) == ["cube.default(!)"]
    function(x)


def test_another_thread_has_its_own_choice() -> None:
    function, _ = compiled(kdk.ops.cube)
    x = torch.randn(3, 4)
    with kdk.record() as r, kdk.use("reference"):
        function(x)
        thread = threading.Thread(target=function, args=(x,))
        thread.start()
        thread.join()
    assert [(row.implementation, row.how) for row in r.rows] == [("reference", "inlined"), ("torch", "device")]


def test_the_first_choice_of_a_thread() -> None:
    """Compiled in a thread that never chose: what it read must be guarded all the same."""
    function, counter = compiled(kdk.ops.cube)
    seen: list[list[str]] = []

    def run() -> None:
        x = torch.randn(3, 4)
        function(x)
        seen.append(called(counter))
        with kdk.use("triton"):
            function(x)
        seen.append(called(counter))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [["cube.default()"], ["cube.default(triton)"]]


CONTEXTS = {
    "use": lambda: kdk.use("torch"),
    "use one": lambda: kdk.use(cube="torch"),
    "simulate": lambda: kdk.simulate("v6e"),
    "strict": lambda: kdk.strict(),
}


@pytest.mark.parametrize("name", list(CONTEXTS))
def test_a_context_inside_the_compiled_function(name: str) -> None:
    context = CONTEXTS[name]

    def inside(x: Tensor) -> Tensor:
        with context():
            y = kdk.ops.cube(x)
        return y + kdk.ops.cube(x)

    function, counter = compiled(inside)
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(3):
        function(x).sum().backward()
    expected = {"use": "torch", "use one": "torch", "simulate": "pallas@v6e", "strict": "!"}[name]
    assert called(counter) == [f"cube.default({expected})", "cube.default()"]
    with kdk.use("reference"):
        for _ in range(2):
            function(x)
    assert called(counter) == ([] if name == "strict" else [f"cube.default({expected})"])
    assert counter.frame_count == 2
    assert kdk.selection.LOCAL.choice == {}


def test_nested_contexts_around_and_inside_do_not_recompile() -> None:
    """The choice around a choice is kept in it, and must not be guarded as an object of its own."""

    def inside(x: Tensor) -> Tensor:
        with kdk.use("torch"):
            return kdk.ops.cube(x)

    function, counter = compiled(inside)
    x = torch.randn(3, 4)
    for _ in range(3):
        with kdk.use("reference"), kdk.strict(), kdk.use(cube="triton"):
            function(x)
    assert counter.frame_count == 1


def test_a_context_that_ended_before_backward() -> None:
    function, _ = compiled(kdk.ops.cube)
    x = torch.randn(3, 4, requires_grad=True)
    with kdk.use("triton"):
        loss = function(x).sum()
    with kdk.record() as r:
        loss.backward()
    assert [(row.direction, row.implementation, row.how) for row in r.rows] == [
        ("backward", "torch", "device"),
        ("backward", "triton", "refused"),
    ]


def test_a_checkpoint_inside_the_compiled_function() -> None:
    def block(x: Tensor) -> Tensor:
        return kdk.ops.cube(x).sin()

    function, _ = compiled(lambda x: checkpoint(block, x, use_reentrant=False).sum())
    x = torch.randn(3, 4, requires_grad=True)
    with kdk.record() as r:
        with kdk.use("triton"):
            loss = function(x)
        loss.backward()
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    torch.testing.assert_close(x.grad, expected)
    refused = [(row.direction, row.calls) for row in r.rows if (row.implementation, row.how) == ("triton", "refused")]
    assert refused == [("forward", 2), ("backward", 1)]


WRONG = r"shape of weight.*got \(5,\).*\(4,\), the last dimension of x"


@pytest.mark.parametrize("dynamic", [False, None])
def test_errors_keep_their_text(dynamic: bool | None) -> None:
    """Dynamo wraps what is raised in a traced function or in a fake; the text comes through."""
    for operator in (kdk.ops.rms_norm, torch.ops.kdk.rms_norm):
        function, _ = compiled(lambda x, w, f=operator: f(x, w, 1e-5), dynamic=dynamic)
        with pytest.raises(Exception, match=WRONG):
            function(torch.randn(2, 4), torch.randn(5))


def test_without_fullgraph_the_error_is_the_error() -> None:
    function = torch.compile(lambda x, w: kdk.ops.rms_norm(x, w, 1e-5), backend="eager")
    with pytest.raises(kdk.errors.InputError, match=WRONG):
        function(torch.randn(2, 4), torch.randn(5))


def test_a_graph_break_leaves_the_dispatch_untraced() -> None:
    """Operators called between graphs: dynamo sees each new frame, and would compile those behind the operator."""

    def step(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        try:
            y = kdk.ops.times_table(torch.ops.kdk.cube(x), x[0].detach())
            y.sum().backward()
        finally:
            pass
        return y

    torch._dynamo.utils.counters.clear()
    counter = CompileCounterWithBackend("eager")
    x = torch.randn(3, 4, requires_grad=True)
    torch.compile(step, backend=counter)(x)
    targets = [n.target for graph in counter.graphs for n in graph.graph.nodes if n.op == "call_function"]
    assert [t for t in targets if "backward" in str(t)] == []
    assert torch._dynamo.utils.counters["frames"]["total"] <= 4  # step, what follows its break, the front door
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2 * x[0].detach())


def test_inductor() -> None:
    """An inlined operator, a kept one and one with a missing gradient, in one graph; a second size makes it dynamic."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        left, _ = torch.ops.kdk.scale_both(x * 2, w, 3.0)
        return kdk.ops.cube(kdk.ops.rms_norm(left, w, 1e-5)).cos()

    def tensors(rows: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(rows)
        return torch.randn(rows, 6, requires_grad=True), torch.randn(6, requires_grad=True)

    function = torch.compile(model, fullgraph=True)
    with kdk.record() as r:
        for rows in (4, 4, 7, 9):
            mine, plain = tensors(rows), tensors(rows)
            a, b = function(*mine), model(*plain)
            torch.testing.assert_close(a, b)
            a.sum().backward()
            b.sum().backward()
            for p, q in zip(mine, plain):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-4)  # values up to 100, sums in another order
    assert r.calls("rms_norm", how="inlined") == 2  # traced for the first size, and for all others
    assert r.calls("cube", implementation="torch") == 8
