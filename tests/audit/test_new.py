"""`kdk new`: a folder that is checked at once, and from a gap of an audit to its being filled."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kdk.ops  # noqa: F401  (registers the operators, which the fixture below keeps)
from kdk import registry
from kdk.errors import UsageError
from kdk_bench import cli


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def forget() -> Any:
    """The operators that a test registers are not there for the next one."""
    before = dict(registry.OPERATORS)
    yield
    for name in set(registry.OPERATORS) - set(before):
        del registry.OPERATORS[name]


@pytest.mark.parametrize("kind", ["elementwise", "row", "matmul", "gather"])
def test_a_new_operator_passes_its_check_in_every_language(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("new", f"new_{kind}", "--kind", kind, "--dir", str(tmp_path)) == 0
    report = tmp_path / "report.json"
    assert run("check", "--ops", str(tmp_path), "--jobs", "0", "--dtype", "float32", "--json", str(report)) == cli.HOLDS
    rows = json.loads(report.read_text())["results"]
    passed = {r["implementation"] for r in rows if r["outcome"] == "passed"}
    assert passed == {"reference", "triton", "pallas", "nki"}


def apart(*arguments: str) -> int:
    """The command in a process of its own: a process loads a folder of operators once."""
    command = [sys.executable, "-m", "kdk_bench.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


def chain(report: Path, *arguments: str) -> dict[str, Any]:
    apart("audit", "tests.audit.models:mish_like", "--target", "cuda", "--json", str(report), *arguments)
    (finding,) = [f for f in json.loads(report.read_text())["findings"] if f["kind"] == "chain"]
    return dict(finding)


@pytest.mark.slow
def test_from_a_finding_to_a_filled_gap(tmp_path: Path) -> None:
    report, folder = tmp_path / "report.json", tmp_path / "ops"
    gap = chain(report)
    assert gap["pattern"] == "element-wise" and gap["filled_by"]["what"] == "open" and gap["calls_per_step"] == 2
    assert apart("new", "mish_like", "--from-audit", str(report), gap["id"], "--dir", str(folder)) == 0
    check = tmp_path / "check.json"
    options = ("--ops", str(folder), "--jobs", "0", "--dtype", "float32", "--json", str(check))
    assert apart("check", *options) == cli.HOLDS
    outcomes = {(r["implementation"], r["outcome"]) for r in json.loads(check.read_text())["results"]}
    assert ("reference", "passed") in outcomes and ("triton", "refused") in outcomes and ("triton", "passed") not in outcomes
    unwritten = chain(report, "--ops", str(folder))
    assert unwritten["pattern"] == "mish_like" and unwritten["filled_by"]["what"] == "open"
    assert "not written yet" in unwritten["filled_by"]["name"]
    kernel = folder / "mish_like" / "triton.py"
    formula = "    return x0 * tl.exp(-tl.abs(x0)) + x0 / (1.0 + tl.exp(-x0))"
    text = re.sub(r"    # To be written.*\n    return x0", formula, kernel.read_text())
    kernel.write_text(text[: text.index("\n\ndef supports")])
    filled = chain(report, "--ops", str(folder))
    assert filled["filled_by"]["what"] == "kdk" and "mish_like (triton)" in filled["filled_by"]["name"]
    assert filled["evidence"]["kind"] == "measured"
    assert apart("check", *options, "--implementation", "triton") == cli.HOLDS
    assert {r["outcome"] for r in json.loads(check.read_text())["results"]} == {"passed"}


@pytest.mark.slow
def test_a_missing_operator_and_a_formula_become_operators(tmp_path: Path) -> None:
    """On TPU: a median, which it lacks, and attention with a bias, whose Pallas kernel is then written."""
    report, folder = tmp_path / "report.json", tmp_path / "ops"
    audited = ("audit", "tests.audit.models:scores", "--target", "tpu", "--json", str(report))

    def findings(*more: str) -> dict[str, dict[str, Any]]:
        apart(*audited, *more)
        found = json.loads(report.read_text())["findings"]
        return {f["kind"]: f for f in found if f["kind"] in ("missing", "chain")}

    gaps = findings()
    assert gaps["missing"]["op"] == "aten::median.dim" and gaps["chain"]["pattern"] == "attention_with_bias"
    for name, gap in (("row_median", gaps["missing"]), ("biased_attention", gaps["chain"])):
        assert apart("new", name, "--from-audit", str(report), gap["id"], "--dir", str(folder)) == 0
    check = tmp_path / "check.json"
    options = ("--ops", str(folder), "--jobs", "0", "--dtype", "float32", "--json", str(check))
    assert apart("check", *options) == cli.HOLDS
    outcomes = {(r["op"], r["implementation"], r["outcome"]) for r in json.loads(check.read_text())["results"]}
    for name in ("row_median", "biased_attention"):
        assert {(i, o) for op, i, o in outcomes if op == name} == {
            ("reference", "passed"), ("triton", "refused"), ("pallas", "refused"), ("nki", "refused")
        }  # fmt: skip
    unwritten = findings("--ops", str(folder))
    assert unwritten["chain"]["pattern"] == "biased_attention"
    assert all(f["filled_by"]["what"] == "open" and "not written yet" in f["filled_by"]["name"] for f in unwritten.values())
    formulas = {
        "biased_attention": "    return jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) * scale + bias, -1) @ v",
        "row_median": "    at = (x0.shape[-1] - 1) // 2\n    return jnp.sort(x0)[..., at], jnp.argsort(x0)[..., at]",
    }
    for name, formula in formulas.items():
        kernel = folder / name / "pallas.py"
        text = re.sub(r"    # To be written.*\n    raise NotImplementedError", formula, kernel.read_text())
        kernel.write_text(text[: text.index("\n\ndef supports")])
    filled = findings("--ops", str(folder))
    assert {f["filled_by"]["name"] for f in filled.values()} == {f"kdk.ops.{name} (pallas)" for name in formulas}
    assert apart("check", *options, "biased_attention", "--implementation", "pallas") == cli.HOLDS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Bad-Name"], "small letters"),
        (["rms_norm"], "there is an operator"),
        (["fine", "--from-audit", "pyproject.toml", "x"], "could not be read as JSON"),
        (["fine", "--from-audit", "pyproject.toml", "x", "--kind", "row"], "leave --kind out"),
        (["fine", "--dir", "pyproject.toml"], "could not be written"),
    ],
)
def test_usage(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("new", "--dir", str(tmp_path), *arguments) == cli.USAGE
    assert said in capsys.readouterr().err


GOOD = {"inputs": [["x0", "float32[2, 3]"]], "steps": [["v0", "torch.ops.aten.exp.default(x0)"]], "outputs": ["v0"]}
SEVERAL = [["v0", "torch.ops.aten.topk.default(x0, 2, -1, dtype=torch.float32, y=[1, -2.5, float('inf'), None])"]]


@pytest.mark.parametrize(
    ("program", "good"),
    [
        (GOOD, True),
        ({**GOOD, "steps": SEVERAL, "outputs": ["v0[0]", "v0[1]"]}, True),
        ({"formula": "dynamic_quant", "inputs": GOOD["inputs"], "scalars": {}}, True),
        (3, False),
        ({}, False),
        ({**GOOD, "inputs": 3}, False),
        ({**GOOD, "inputs": [["x0", "float32"]]}, False),
        ({**GOOD, "steps": [["v0", "import os"]]}, False),
        ({**GOOD, "steps": [["v0", "torch.os.system('true')"]]}, False),
        ({**GOOD, "steps": [["v0", "torch.ops.load_library('x.so')"]]}, False),
        ({**GOOD, "steps": [["v0", "[x for x in y]"]]}, False),
        ({**GOOD, "steps": [["v0; import os", "torch.ops.aten.exp.default(x0)"]]}, False),
        ({**GOOD, "outputs": ["x0.__class__"]}, False),
    ],
)
def test_a_program_of_a_report_is_run_only_as_kdk_writes_it(program: Any, good: bool) -> None:
    from kdk_bench.new.captured import captured, well_formed

    assert well_formed(program) == good
    if not good:
        with pytest.raises(UsageError, match="not as kdk wrote it"):
            captured({"id": "chain-tpu-0", "module": "m", "line": "l", "op": "", "program": program})
