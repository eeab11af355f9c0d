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


@pytest.mark.parametrize("kind", ["elementwise", "row"])
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Bad-Name"], "small letters"),
        (["rms_norm"], "there is an operator"),
        (["fine", "--from-audit", "pyproject.toml", "x"], "could not be read as JSON"),
    ],
)
def test_usage(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("new", *arguments, "--dir", str(tmp_path)) == cli.USAGE
    assert said in capsys.readouterr().err
