"""Which implementation runs: contexts, the process's default, the environment, strict, simulate; and their errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest
import torch

import kdk
from kdk import selection
from kdk.errors import FallbackWarning, GradientError, RefusedError, UsageError
from kdk.selection import current


def ran(function: Any) -> list[str]:
    """What ran, in short; refusals included."""
    with warnings.catch_warnings(), kdk.record() as r:
        warnings.simplefilter("ignore", FallbackWarning)
        function()
    return [f"{row.op}.{row.direction} {row.implementation} {row.how}" for row in r.rows]


def even() -> torch.Tensor:
    return torch.randn(3, 4, requires_grad=True)


def cube(x: torch.Tensor | None = None) -> torch.Tensor:
    return kdk.ops.cube(even() if x is None else x)


def test_the_usual_order_takes_the_algorithm_first() -> None:
    assert ran(cube) == ["cube.forward torch device"]


def test_use_for_all_and_for_one() -> None:
    with kdk.use("reference"):
        assert current("cube") == current("rms_norm") == "reference"
        with kdk.use(cube="torch"):
            assert (current("cube"), current("rms_norm")) == ("torch", "reference")
            with kdk.use("triton"):  # for all: what was said for one before is over
                assert current("cube") == "triton"
            assert current("cube") == "torch"
        assert current("cube") == "reference"
    assert current("cube") == ""


def test_the_context_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), kdk.use("reference"):
        raise KeyError
    assert current("cube") == ""


def test_one_context_object_entered_twice() -> None:
    choice = kdk.use("reference")
    with kdk.use("torch"), choice:
        with choice:
            assert current("cube") == "reference"
        assert current("cube") == "reference"
    assert current("cube") == ""


def test_one_context_object_in_two_threads() -> None:
    choice, entered, leave, seen = kdk.use("reference"), threading.Event(), threading.Event(), []

    def other() -> None:
        with kdk.use("torch"):
            with choice:
                entered.set()
                leave.wait(5)
            seen.append(current("cube"))

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(5)
    with choice:
        leave.set()
        thread.join()
    assert seen == ["torch"] and current("cube") == ""


def test_a_choice_holds_for_its_thread() -> None:
    seen: list[str] = []
    with kdk.use("reference"):
        thread = threading.Thread(target=lambda: seen.append(current("cube")))
        thread.start()
        thread.join()
    assert seen == [""]


def test_set_default() -> None:
    kdk.set_default("reference")
    kdk.set_default(cube="torch")
    assert (current("cube"), current("rms_norm")) == ("torch", "reference")
    with kdk.use("triton"):
        assert current("cube") == "triton"
    kdk.set_default("pallas")
    assert current("cube") == "pallas"
    kdk.set_default()
    assert current("cube") == ""


def test_strict_survives_use_and_set_default() -> None:
    with kdk.strict(), kdk.use("reference"):
        assert current("cube") == "reference!"
    with kdk.use("reference"), kdk.strict():
        assert current("cube") == "reference!"
    selection.DEFAULT[selection.STRICT] = "!"
    kdk.set_default("torch")
    assert current("cube") == "torch!"
    kdk.set_default()
    assert current("cube") == "!"
    assert ran(cube) == ["cube.forward torch device"]


@pytest.mark.parametrize(
    ("how", "code"),
    [
        (lambda: kdk.use("cuda"), "KDK-IMPLEMENTATION"),
        (lambda: kdk.use(""), "KDK-IMPLEMENTATION"),
        (lambda: kdk.use(cube=None), "KDK-IMPLEMENTATION"),
        (lambda: kdk.use("triton!"), "KDK-IMPLEMENTATION"),
        (lambda: kdk.use("triton@v6e"), "KDK-TARGET"),
        (lambda: kdk.use("reference@sm_90"), "KDK-TARGET"),
        (lambda: kdk.use(rmsnorm="reference"), "KDK-OPERATOR"),
        (lambda: kdk.set_default("fast"), "KDK-IMPLEMENTATION"),
        (lambda: kdk.set_default(rmsnorm="reference"), "KDK-OPERATOR"),
        (lambda: kdk.simulate("h100"), "KDK-TARGET"),
        (lambda: kdk.simulate(["v6e"]), "KDK-TARGET"),
    ],
)
def test_unknown_names(how: Any, code: str) -> None:
    before = dict(selection.DEFAULT)
    with pytest.raises(UsageError, match=r"there are|has ") as e:
        how()
    assert e.value.code == code
    assert before == selection.DEFAULT and current("cube") == ""


def test_an_unknown_operator() -> None:
    with pytest.raises(AttributeError, match=r"no operator 'rmsnorm'; there are .*rms_norm"):
        kdk.ops.rmsnorm  # noqa: B018


def test_the_choice_of_the_forward_holds_in_backward() -> None:
    def after() -> None:
        with kdk.use("torch"):
            y = kdk.ops.rms_norm(torch.randn(2, 4, requires_grad=True), torch.ones(4), 1e-5)
        with kdk.use("reference"):
            y.sum().backward()

    assert ran(after) == [
        "rms_norm.forward reference device",
        "rms_norm.forward torch refused",
        "rms_norm.backward reference device",
        "rms_norm.backward torch refused",
    ]


def test_the_choice_reaches_a_backward_in_another_thread() -> None:
    def go() -> None:
        with kdk.use("torch"):
            loss = kdk.ops.rms_norm(torch.randn(2, 4, requires_grad=True), torch.ones(4), 1e-5).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    assert "rms_norm.backward torch refused" in ran(go)


def test_the_reference_is_inlined() -> None:
    with kdk.use("reference"):
        assert ran(lambda: cube().sum().backward()) == ["cube.forward reference inlined"]


def test_a_refusal_moves_on_warns_once_and_is_counted() -> None:
    odd = torch.randn(3, 37)
    with pytest.warns(FallbackWarning, match=r"cube.forward: torch refused.*37 columns") as caught, kdk.record() as r:
        cube(odd)
        cube(odd)
    assert len(caught) == 1
    assert [(row.implementation, row.how, row.reason, row.calls) for row in r.rows] == [
        ("reference", "device", "", 2),
        ("torch", "refused", "37 columns; an even number is needed", 2),
    ]


def test_strict_raises() -> None:
    with kdk.strict(), pytest.raises(RefusedError, match=r"cube.forward: torch refused.*39 columns.*Way out: leave"):
        cube(torch.randn(3, 39))
    with kdk.strict(), kdk.use("torch"), pytest.raises(RefusedError, match="no algorithm"):
        kdk.ops.rms_norm(torch.randn(2, 4), torch.ones(4), 1e-5)
    with kdk.strict(), kdk.use("triton"), pytest.raises(RefusedError, match=r"torch\.func"):
        torch.func.grad(lambda x: cube(x).sum())(torch.randn(2, 4))


def test_strict_reaches_backward() -> None:
    with kdk.strict():
        loss = cube(torch.randn(2, 4, requires_grad=True)).sum()
    loss.backward()
    with kdk.strict():
        y = kdk.ops.top_values(torch.randn(2, 4, requires_grad=True), 2)
    assert ran(y.sum().backward) == ["top_values.backward reference device"]


def test_a_gradient_that_the_backward_lacks_is_inlined() -> None:
    x, table = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    with kdk.record() as r:
        kdk.ops.times_table(x, table).sum().backward()
        kdk.ops.times_table(x=x, table=table)
        with torch.no_grad():
            kdk.ops.times_table(x, table)
        kdk.ops.times_table(x, table.detach())
    assert table.grad is not None and torch.equal(table.grad, x.sum(0))
    assert [(row.how, row.reason, row.calls) for row in r.rows] == [("device", "", 2), ("inlined", "gradient of table", 2)]
    with kdk.strict(), pytest.raises(RefusedError, match="gradient of its argument 'table'"):
        kdk.ops.times_table(x, table)
    with pytest.raises(GradientError, match=r"no gradient for 'table'.*use\(times_table='reference'\)"):
        torch.ops.kdk.times_table(x, table)


def test_simulate_runs_the_kernel_of_a_chip() -> None:
    x, w = torch.randn(3, 128), torch.randn(128)
    with kdk.record() as r, kdk.simulate("v6e"):
        y = kdk.ops.rms_norm(x, w, 1e-5)
    assert [(row.implementation, row.how, row.target) for row in r.rows] == [("pallas", "simulated", "v6e")]
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (128,), w, 1e-5))


def test_simulate_what_has_no_kernel() -> None:
    x = torch.randn(3, 4)  # of an operator that nothing else simulates: the warning comes once in a process
    with pytest.warns(FallbackWarning, match="add_bias has no pallas kernel"), kdk.record() as r, kdk.simulate("v6e"):
        kdk.ops.add_bias(x)
    assert [(row.implementation, row.how) for row in r.rows] == [("pallas", "refused"), ("reference", "device")]


def test_empty_inputs_reach_no_kernel() -> None:
    x = torch.randn(0, 128, requires_grad=True)
    with kdk.record() as r, kdk.use("pallas"), kdk.strict():
        kdk.ops.rms_norm(x, torch.randn(128), 1e-5).sum().backward()
    assert [(row.direction, row.implementation, row.reason) for row in r.rows] == [
        ("forward", "reference", "empty input"),
        ("backward", "reference", "empty input"),
    ]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, text=True, capture_output=True, check=False
    )


CURRENT = "from kdk.selection import current; print(current('rms_norm'), current('rope'))"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"KDK_USE": "triton"}, "triton triton"),
        ({"KDK_USE": "rms_norm=reference, rope=torch"}, "reference torch"),
        ({"KDK_USE": "torch,rope=nki@trn2"}, "torch nki@trn2"),
        ({"KDK_STRICT": "1"}, "! !"),
        ({"KDK_STRICT": "1", "KDK_USE": "triton"}, "triton! triton!"),
        ({"KDK_STRICT": "0", "KDK_USE": ""}, " "),
    ],
)
def test_environment(environment: dict[str, str], expected: str) -> None:
    assert python(CURRENT, **environment).stdout == expected + "\n"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"KDK_USE": "fast"}, "KDK-IMPLEMENTATION"),
        ({"KDK_USE": "rms_norm="}, "KDK-IMPLEMENTATION"),
        ({"KDK_USE": "reference!"}, "KDK-IMPLEMENTATION"),
        ({"KDK_USE": "=triton"}, "KDK-USE"),
        ({"KDK_STRICT": "yes"}, "KDK-STRICT"),
    ],
)
def test_environment_errors(environment: dict[str, str], message: str) -> None:
    done = python("import kdk", **environment)
    assert done.returncode != 0 and message in done.stderr.splitlines()[-1]


def test_environment_names_an_unknown_operator() -> None:
    done = python("import kdk.ops", KDK_USE="rmsnorm=reference")
    assert done.returncode == 0
    assert "UsageWarning: KDK_USE names 'rmsnorm'" in done.stderr
