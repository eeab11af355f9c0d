"""The command line as a user meets it: reports, exit codes, and errors in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kdk_kernels.rms_norm.triton as kernel
from kdk_bench import cli, evidence
from kdk_bench.check import Result, Row
from kdk_bench.report import exit_code, github_lines

ROW = ["check", "rms_norm", "--implementation", "triton", "--direction", "forward", "--dtype", "float32", "--jobs", "0"]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


def test_list_as_json_and_nothing_else_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--json", "-") == cli.HOLDS
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "kdk.list/1"
    entry = next(e for e in report["ops"] if e["name"] == "rms_norm")
    assert set(entry) == {"name", "summary", "implementations", "evidence", "tuning"}
    assert entry["summary"] and entry["implementations"]["triton"] == {"forward": True, "backward": True}
    for record in entry["evidence"]:
        assert set(record) == {"implementation", "direction", "target", "report", "evidence", "environment", "date"}


def test_check_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(*ROW, "--json", "-") == cli.HOLDS
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "kdk.check/1" and len(report["results"]) >= 12
    for result in report["results"]:
        assert set(result) == {
            "op", "direction", "implementation", "target", "case", "dtype", "outcome", "error_ratio", "reason", "reproduce",
            "evidence", "environment", "date",
        }  # fmt: skip
        assert result["outcome"] == "passed" and result["evidence"] == "simulated" and result["target"] == "sm_90"
        assert 0 <= result["error_ratio"] <= 1 and result["environment"]["torch"]


def test_a_wrong_kernel_exits_1_and_its_line_reproduces_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda *args: tuple(2 * t for t in right(*args)))
    assert run(*ROW, "--github") == cli.DOES_NOT_HOLD
    out = capsys.readouterr().out
    assert "wrong scale" in out and "::error title=kdk check rms_norm.forward triton" in out
    line = next(line for line in out.splitlines() if "reproduce: kdk check" in line)
    import shlex

    words = shlex.split(line.split("reproduce: kdk ")[1])
    assert run(*words, "--jobs", "0") == cli.DOES_NOT_HOLD
    monkeypatch.setattr(kernel, "forward", right)
    assert run(*words, "--jobs", "0") == cli.HOLDS


def test_a_crashing_process_is_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator whose kernel kills the process: its row is unknown, the reference's row stands, and the exit code says 3."""
    folder = tmp_path / "deadly"
    folder.mkdir()
    (folder / "reference.py").write_text(
        'from torch import Tensor\n\n\ndef deadly(x: Tensor) -> Tensor:\n    """A copy."""\n    return x.clone()\n\n\n'
        "def check(x: Tensor) -> None: ...\n"
    )
    (folder / "__init__.py").write_text(
        "from kdk import Op\nfrom . import reference\n\nop = Op(reference=reference.deadly, check=reference.check, kind='elementwise',"
        " outputs=('y',), shapes={'x': '*N', 'y': '*N'})\n"
    )
    (folder / "cases.py").write_text(
        "from kdk.cases import Case, Cases, Dim\nCASES = Cases(dims={'N': Dim()}, models=(Case('a', {'N': 9}),))\n"
    )
    (folder / "algorithm.py").write_text("import os\n\n\ndef forward(x):\n    os._exit(7)\n")
    options = ["--implementation", "reference", "--implementation", "torch", "--dtype", "float32", "--jobs", "2"]
    assert run("check", "deadly", "--ops", str(folder), *options) == cli.UNDETERMINED
    out = capsys.readouterr().out
    assert "the process died" in " ".join(out.split()) and "passed" in out


def test_a_row_that_died_is_no_unknown_case(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Result(Row("rms_norm", "forward", "triton", "sm_90", "float32"), "all", "unknown", reason="the process died")
    monkeypatch.setattr("kdk_bench.runner.run", lambda plan, **options: [lost])
    assert run(*ROW, "--case", "plain") == cli.UNDETERMINED


def test_a_wrong_environment_variable_is_said_in_one_line() -> None:
    environment = {**os.environ, "KDK_USE": "fast"}
    done = subprocess.run([sys.executable, "-m", "kdk_bench.cli", "list"], env=environment, capture_output=True, text=True)
    assert done.returncode == cli.USAGE and "KDK_USE" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "rms_nrom"], "there are"),
        (["check", "--implementation", "cuda"], "unknown implementation"),
        (["check", "--target", "h100"], "chips are"),
        (["check", "rms_norm", "--dtype", "int4"], "nothing to check"),
        ([*ROW, "--case", "no such case"], "no case has this name"),
        (["check", "--ops", "no/such/folder"], "no such folder"),
        (["check", "rms_norm", "--jobs", "-1"], "--jobs"),
        (["list", "--json", "no/such/folder/list.json"], "No such file or directory"),
        (["check", "--nonsense"], "--nonsense"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_usage_errors_exit_2_in_a_few_words(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == cli.USAGE
    captured = capsys.readouterr()
    assert said in captured.err and "Traceback" not in captured.err and not captured.out


def test_exit_codes_follow_the_outcomes() -> None:
    row = Row("a", "forward", "triton", "sm_90", "float32")
    results = {o: Result(row, "case", o) for o in ("passed", "failed", "refused", "uninformative", "unknown")}
    assert exit_code([results["passed"], results["refused"], results["uninformative"]]) == cli.HOLDS
    assert exit_code([results["passed"], results["unknown"]]) == cli.UNDETERMINED
    assert exit_code([results["failed"], results["unknown"]]) == cli.DOES_NOT_HOLD
    assert len(github_lines(results.values())) == 2


def test_evidence_is_merged_and_only_from_what_passed(tmp_path: Path) -> None:
    def result(outcome: str, date: str, direction: str = "forward") -> dict[str, object]:
        return {
            "op": "a", "implementation": "triton", "direction": direction, "target": "sm_90", "evidence": "simulated",
            "environment": {}, "date": date, "outcome": outcome, "dtype": "float32", "error_ratio": 0.5,
        }  # fmt: skip

    store = tmp_path / "evidence" / "evidence.json"
    first = [result("passed", "2026-01-01"), result("refused", "2026-01-01"), result("failed", "2026-01-01", "backward")]
    assert evidence.add({"schema": "kdk.check/1", "results": first}, store) == 1
    assert evidence.add({"schema": "kdk.check/1", "results": [result("passed", "2026-02-01")]}, store) == 1
    assert [(r["direction"], r["date"]) for r in evidence.load(store)] == [("forward", "2026-02-01")]


def test_evidence_from_something_else_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("a.json", '{"schema": "other/1"}'), ("b.json", "not json")):
        (tmp_path / name).write_text(text)
        assert run("evidence", "add", str(tmp_path / name)) == cli.USAGE
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["list", "env"])
def test_tables_in_ascii(command: str) -> None:
    """On a terminal that has nothing else, and 60 columns wide, no name is cut short."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    done = subprocess.run([sys.executable, "-m", "kdk_bench.cli", command], env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and done.returncode in (cli.HOLDS, cli.DOES_NOT_HOLD), done.stderr
