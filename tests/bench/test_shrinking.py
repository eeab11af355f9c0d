"""A failing case becomes smaller, and one line says it."""

import shlex

import pytest
import torch

import kdk.ops  # noqa: F401  (registers the operators)
import kdk_kernels.rms_norm.triton as kernel
from kdk.errors import UsageError
from kdk.registry import OPERATORS
from kdk_bench import cli, runner
from kdk_bench.check import Row
from kdk_bench.drawing import draw
from kdk_bench.generate import Problem, problems, shape
from kdk_bench.shrinking import MOST_TRIES, shrink
from kdk_bench.spelling import parse, spell

RMS, ROPE = OPERATORS["rms_norm"].op, OPERATORS["rope"].op
NAMES = [name for name, operator in OPERATORS.items() if operator.op.package.startswith("kdk_kernels.")]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", NAMES)
def test_a_line_says_all_of_a_case(name: str, direction: str) -> None:
    op = OPERATORS[name].op
    if op.function(direction) is None:
        pytest.skip("it has no backward")
    for problem in problems(op, direction, full=op in (RMS, ROPE)):
        line = spell(op, problem)
        again = parse(op, line)
        assert spell(op, again) == line
        for field in ("sizes", "scalars", "mixed", "layout", "values", "needs", "absent", "ones", "left_out"):
            assert getattr(again, field) == getattr(problem, field), (line, field)
        for tensor in op.tensors:
            assert shape(op, tensor, again) == shape(op, tensor, problem), line
        if problem.elements < 2000 and "far" not in problem.layout:
            old, new = (draw(op, op.tensors, p, torch.float32, 3).tensors for p in (problem, again))
            assert old.keys() == new.keys()
            for values, again_ in zip(old.values(), new.values()):
                torch.testing.assert_close(values, again_, rtol=0, atol=0, equal_nan=True, msg=line)


def case(name: str, seed: int = 0) -> Problem:
    return next(p for p in problems(ROPE, "forward", seed=seed) if p.name == name)


def test_what_the_fault_does_not_need_goes() -> None:
    problem = case("prime, far rows")
    assert problem.layout == "far rows"
    small = shrink(ROPE, problem, lambda p: p.sizes["S"] * p.sizes["D"] >= 40)
    assert (small.layout, small.values, small.mixed, small.left_out, small.ones) == ("contiguous", "normal", (), (), ())
    assert {letter: small.sizes[letter] for letter in ("Hq", "Hk", "R")} == {"Hq": 1, "Hk": 1, "R": 2}
    assert 40 <= small.sizes["S"] * small.sizes["D"] < 80
    assert parse(ROPE, small.name).sizes == small.sizes


def test_what_the_fault_needs_stays() -> None:
    problem = case("infinities and NaN")
    small = shrink(ROPE, problem, lambda p: p.layout == "strided" and p.scalars == problem.scalars and p.sizes["S"] >= 3)
    assert small.layout == "strided" and small.scalars == problem.scalars and small.sizes["S"] == 3
    assert f"layout=strided values={'special'}" not in small.name and "layout=strided" in small.name


def test_a_fault_that_is_always_there_costs_no_more_than_it_may() -> None:
    tried: list[Problem] = []
    small = shrink(ROPE, case("plain"), lambda p: not tried.append(p))
    assert len(tried) <= MOST_TRIES and max(small.sizes.values()) == 2  # R turns in pairs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("N=3", "it lacks H"),
        ("N=3 H=0", "the nearest sizes"),
        ("N=3 H=4 layoud=strided", "no such word"),
        ("N=3 H=few", "no size of a letter"),
    ],
)
def test_words_that_make_no_case_are_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(RMS, f"plain: {words}")


def test_the_line_of_a_random_failing_case_reproduces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is wrong past 64 columns: the line names the smallest such row, and fails as long as the fault is there."""
    right = kernel.forward

    def wrong(x, *rest):  # type: ignore[no-untyped-def]
        y, rstd = right(x, *rest)
        y[..., 64:] *= 2
        return y, rstd

    monkeypatch.setattr(kernel, "forward", wrong)
    row = Row("rms_norm", "forward", "triton", "sm_90", "float32")
    results = runner.run(runner.Plan([row], seed=11))
    lines = [r.reproduce for r in results if "=" in r.reproduce]
    assert len(lines) == 1 and "N=1 H=65 " in lines[0] and "layout" not in lines[0]
    words = [*shlex.split(lines[0])[1:], "--jobs", "0"]
    for kernel_, code in ((wrong, cli.DOES_NOT_HOLD), (right, cli.HOLDS)):
        monkeypatch.setattr(kernel, "forward", kernel_)
        with pytest.raises(SystemExit) as left:
            cli.main(words)
        assert left.value.code == code


def test_an_argument_that_is_a_size_shrinks_with_its_letter() -> None:
    """`groups` of a case is the size of G, which C is a multiple of."""
    op = OPERATORS["group_norm_silu"].op
    problem = problems(op, "forward")[0]
    found = shrink(op, problem, lambda p: p.sizes["C"] > 4)
    assert found.sizes["C"] % found.sizes["G"] == 0 and found.scalars["groups"] == found.sizes["G"] < problem.sizes["G"]
    assert shrink(op, problem, lambda p: True).scalars["groups"] == 1
