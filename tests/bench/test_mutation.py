"""The mutator: what it changes, what it leaves, and what becomes of a mutant."""

import ast
import sys
from pathlib import Path

import pytest

from kdk.registry import OPERATORS
from kdk_bench.mutation import kept, report, workers
from kdk_bench.mutation.kept import JUDGES, Kept, imported
from kdk_bench.mutation.mutants import Mutant, _changes, all_mutants, sample
from kdk_bench.mutation.mutators import CLASSES
from kdk_bench.mutation.trial import Trial, original, planted, run_mutant, run_original, steps
from kdk_bench.mutation.units import Function, Reach, Source, Unit, units
from kdk_bench.mutation.workers import Work

UNIT = Unit("rms_norm", "forward", "triton")
UNITS = [u for u in units() if OPERATORS[u.op].op.package.startswith("kdk_kernels.")]


def changed(text: str, kind: str, kernel: bool = True) -> set[str]:
    """What a class makes of the only line of a function."""
    tree = ast.parse(f"def f(x, n, stride):\n    i = arange(0, 8)\n    {text}")
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    source = Source("m", tree, {"f": function}, {"TILE"})
    found = _changes(Function("m", function, kernel), source)
    lines = [t.splitlines()[2:] for k, _, t in found if k == kind and "i = arange(0, 8)" in t]
    return {" ".join(line.strip() for line in own) for own in lines}


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("constant", "y = 2.0 * x", {"y = 4.0 * x"}),
        ("operator", "y = x * n", {"y = x / n"}),
        ("operator", "y = x - 0", set()),
        ("operator", "y = x * 1", set()),
        ("comparison", "y = x < n", {"y = x <= n"}),
        ("dropped mask", "y = load(x + i, mask=i < n, other=0.0)", {"y = load(x + i)", "y = load(x + i, mask=i < n)"}),
        ("dropped mask", "y = where(i < n, x, 0.0)", {"y = x"}),
        ("wrong axis", "y = sum(x, axis=1)", {"y = sum(x, axis=0)"}),
        ("wrong axis", "y = x[:, None]", {"y = x[None, :]"}),
        ("off-by-one bound", "y = i < n", {"y = i < n - 1", "y = i < n + 1"}),
        ("missing cast", "y = x.to(float32)", {"y = x"}),
        ("missing cast", "store(x, y.to(d))", set()),
        ("lost accumulation", "y += x", {"y = x"}),
        ("stale tile", "for s in range(2, n): y = load(x + s)", {"for s in range(2, n): y = load(x + 2)"}),
        ("wrong stride", "y = load(x + i * stride)", {"y = load(x + i)"}),
        ("wrong index", "y = load(x + i)", {"y = load(x)"}),
        ("swapped operands", "y = x - n", {"y = n - x"}),
        ("swapped operands", "y = x - x", set()),
        ("swapped operands", "tensor(dst=y, data1=x, data2=n, op=nl.add)", set()),
        ("swapped operands", "tensor(dst=y, data1=x, data2=n, op=o)", {"tensor(dst=y, data2=x, data1=n, op=o)"}),
        ("skipped last tile", "for s in range(0, n, 8): pass", {"for s in range(0, n - 8, 8): pass"}),
        ("missing residual term", "y = x + n", {"y = x", "y = n"}),
    ],
)
def test_a_class_changes(kind: str, text: str, expected: set[str]) -> None:
    assert changed(text, kind) == expected


@pytest.mark.parametrize("text", ["'text 1.0'", "raise ValueError(x < n)", "assert x < n", "f(x, num_warps=2.0, engine=x < n)"])
def test_what_cannot_change_a_result_is_left(text: str) -> None:
    assert all(not changed(text, kind) for kind in CLASSES)


@pytest.mark.parametrize("text", ["n = x * TILE", "n = x * d.itemsize", "n = min(x * n, 8)"])
def test_the_choice_of_tiles_is_left_on_the_host_alone(text: str) -> None:
    assert not changed(text, "operator", kernel=False)
    assert changed(text, "operator", kernel=True)


def test_a_unit_is_what_its_entry_reaches() -> None:
    reach = Reach(OPERATORS["rope"].op, "backward", "triton")
    functions = {name: f.kernel for (_, name), f in reach.functions.items()}
    assert not functions["backward"] and not functions["rotate"]
    assert any(functions.values())
    assert "supports" not in functions and "forward" not in functions
    assert list(reach.sources)[-1] == reach.entry  # imported files can be executed before it


@pytest.mark.parametrize("unit", UNITS, ids=str)
def test_every_kernel_has_mutants_and_the_same_ones_for_the_same_seed(unit: Unit) -> None:
    mutants = all_mutants(unit)
    assert len(mutants) >= 20
    assert len({m.key for m in mutants}) == len(mutants) == len({m.source for m in mutants})
    assert sample(mutants, 0) == sample(mutants, 0) != sample(mutants, 1)
    assert set(sample(mutants, 0)) == set(mutants)


def mutant(unit: Unit, before: str, after: str) -> tuple[str, str]:
    """The unit's file with a piece of text changed."""
    file, text = original(unit)
    assert before in text
    return file, text.replace(before, after)


def test_a_planted_kernel_is_gone_afterwards() -> None:
    import kdk_kernels.rms_norm.triton as real

    before = real.forward
    with planted(UNIT, *mutant(UNIT, "1.0 / tl", "2.0 / tl")):
        assert real.forward is not before
        assert sys.modules["kdk_kernels.rms_norm.triton"] is real
    assert real.forward is before


@pytest.mark.parametrize(
    ("unit", "before", "after", "kill"),
    [
        (UNIT, "1.0 / tl", "2.0 / tl", "numerics"),
        (UNIT, "mask=columns < H)", "mask=columns <= H)", "sanitizer"),
        (UNIT, "return y, rstd", "return y, rstd if len(flat) < 5 else y.missing", "crash"),
        (UNIT, "return y, rstd", "return y, rstd.missing", "stillborn"),
        (UNIT, "import torch\n", "import torch\nimport missing_\n", "stillborn"),
        (Unit("rms_norm", "forward", "nki"), "op=nl.square", "op=nl.abs", "numerics"),
        (Unit("silu_and_mul", "forward", "pallas"), "1.0 + jnp", "2.0 + jnp", "numerics"),
    ],
)
def test_how_a_mutant_ends(unit: Unit, before: str, after: str, kill: str) -> None:
    assert run_mutant(unit, *mutant(unit, before, after), steps(unit)[:6], 0).kill == kill


def test_a_mutant_of_another_file_reaches_the_kernel() -> None:
    """The backward of rope runs the kernel in the forward's file."""
    unit = Unit("rope", "backward", "triton")
    reach = Reach(OPERATORS["rope"].op, "backward", "triton")
    file = next(name for name in reach.sources if name != reach.entry)
    found = next(m for m in all_mutants(unit) if m.module == file and m.kind == "swapped operands" and " - " in m.after)
    assert run_mutant(unit, found.module, found.source, steps(unit)[:3], 0).kill


@pytest.mark.parametrize("forever", ["while True: pass", "import threading; threading.Event().wait()"], ids=["computing", "waiting"])
def test_one_that_hangs_is_killed_and_the_rest_goes_on(forever: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "IDLE", 5.0)
    monkeypatch.setattr(workers, "LEAST_LIMIT", 8.0)  # a new worker also imports triton within it
    monkeypatch.setattr(workers, "SLOWER", 0)
    file, hanging = mutant(UNIT, "    H = x.shape[-1]\n", f"    H = x.shape[-1]\n    {forever}\n")
    _, wrong = mutant(UNIT, "1.0 / tl", "2.0 / tl")
    mutants = [Mutant(UNIT, "constant", file, "forward", 0, text, text, 0, source) for text, source in (("a", hanging), ("b", wrong))]
    work = Work(UNIT, mutants, 2)
    workers.run([work], 1, 0, lambda work, trial: None)
    assert work.baseline is not None and work.baseline.kill == ""
    assert [t.kill for _, t in work.trials] == ["crash", "numerics"]
    assert work.kills.total() == 1


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutants = sample(all_mutants(UNIT), 0)[:3]
    fate = Trial("numerics", ("float32", "plain"), "off", "wrong scale", seconds=0.5)
    stopped = Work(UNIT, list(mutants), 3, Trial("", seconds=2.0, lines=frozenset({("m", 1)})))
    stopped.done(fate)
    Kept(tmp_path, 0).save(stopped)

    again = Work(UNIT, list(mutants), 3)
    Kept(tmp_path, 0).restore(again)
    assert again.baseline == stopped.baseline
    assert again.trials == [(mutants[0], fate)] and again.mutants == mutants[1:]
    assert again.order()[0] == ("float32", "plain")

    monkeypatch.setattr(kept, "LIBRARIES", ())  # as if a version had changed: only what killed is known
    changed = Work(UNIT, list(mutants), 3)
    Kept(tmp_path, 0).restore(changed)
    assert (changed.baseline, changed.trials, changed.mutants) == (None, [], mutants)
    assert changed.kills == again.kills


def test_the_cases_that_kill_most_in_a_second_come_first() -> None:
    first, second, third = (step[1] for step in steps(UNIT)[:3])
    work = Work(UNIT, [], 1, Trial("", costs={first: 8.0, second: 1.0, third: 2.0}))
    place = {name: [n for _, n in work.order()].index(name) for name in (first, second, third)}
    assert place[second] < place[third] < place[first]
    work.kills[("float32", first)] += 9
    assert work.order().index(("float32", first)) < work.order().index(("float32", second))


def test_code_that_only_another_operator_runs_is_left_to_it() -> None:
    lines = {"own": 1, "both": 2, "foreign": 3, "nobody's": 4}
    mutants = [Mutant(UNIT, "constant", "m", "f", line, key, "", 0, "") for key, line in lines.items()]
    own = Work(UNIT, mutants, 4, Trial("", lines=frozenset({("m", 1), ("m", 2)})))
    other = Work(Unit("rope", "forward", "triton"), [], 0, Trial("", lines=frozenset({("m", 2), ("m", 3)})))
    workers._share_out([own, other])
    assert [m.before for m in own.mutants] == ["own", "both", "nobody's"]


def test_a_fault_in_shared_code_is_found_when_any_of_its_users_fails() -> None:
    users = Unit("add_rms_norm", "forward", "nki"), Unit("rms_norm", "forward", "nki")
    own, other = Work(users[0], [], 2, Trial("")), Work(users[1], [], 0, Trial(""))
    own.sharing = [other]
    shared, alone = "kdk_kernels.rms_norm.nki", "kdk_kernels.add_rms_norm.nki"
    own.mutants = [Mutant(users[0], "constant", module, "f", 1, module, "", 0, "") for module in (shared, alone)]
    assert not own.done(Trial("")) and own.next().args[0] == users[1]
    assert own.done(Trial("numerics", ("float32", "plain")))
    assert own.trials[0][1].by == str(users[1]) and other.kills.total() == 1 and own.kills.total() == 0
    assert own.next().args[0] == users[0]
    assert own.done(Trial("")) and not own.trials[1][1].kill


def test_the_lines_that_run_are_known() -> None:
    baseline = run_original(UNIT, True, 0)
    assert baseline.kill == ""
    file, text = original(UNIT)
    number = {line.strip(): i + 1 for i, line in enumerate(text.splitlines())}
    assert {(file, number["H = x.shape[-1]"]), (file, number["sums += values * values"])} <= baseline.lines


def judged(key: str, kill: str, cause: str = "") -> tuple[Mutant, Trial]:
    return Mutant(UNIT, "constant", "m", "f", 1, key, "x", 0, ""), Trial(kill, cause=cause)


def test_the_report_counts_and_says_what_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [judged("a", "numerics", "wrong scale"), judged("b", "numerics", "wrong axis"), judged("c", ""), judged("d", "stillborn")]
    work = Work(UNIT, [], 4, Trial(""), trials)
    totals = report.Totals(trials)
    assert (totals.mutants, totals.rate, totals.kills["numerics"]) == (3, 2 / 3, 2)
    assert report.diagnosed(trials) == (1, 2)
    assert len(report.problems([work], set())) == 4  # too few, overall, the kernel, the diagnosis
    monkeypatch.setattr(report, "EXPLAINED", {trials[2][0].key: "equal"})
    assert report.Totals(trials).rate == 1.0
    keys = {m.key for m, _ in trials}
    found = report.problems([work], keys)
    assert found[:2] == [f"{UNIT}: only 3 mutants count, 4 must", "1 of 3 mutants are explained, at most 5% may be"]
    assert len(found) == 3 and "the first guess" in found[2]


@pytest.mark.parametrize(("key", "said"), [("gone", "no such mutant"), ("a", "but killed")])
def test_a_stale_explanation_fails(key: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = judged("a", "numerics", "wrong scale")
    name = pair[0].key if key == "a" else f"{UNIT} | f: {key}"
    monkeypatch.setattr(report, "EXPLAINED", {name: "equal"})
    work = Work(UNIT, [], 1, Trial(""), [pair])
    assert any(said in f for f in report.problems([work], {pair[0].key}))


def test_what_judges_is_what_it_imports() -> None:
    found = imported(JUDGES)
    assert {"kdk_bench.check", "kdk_bench.generate", "kdk_bench.numerics", "kdk_bench.mutation.mutators"} <= found
    assert not {"kdk_bench.cli", "kdk_bench.audit", "kdk_bench.compile", "kdk_bench.mutation.report"} & found
