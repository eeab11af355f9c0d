"""docs/operators/*.md and the README's table say what the declarations and the store of evidence say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kdk.ops  # noqa: F401
from kdk.backends import LANGUAGES
from kdk.registry import OPERATORS
from kdk_bench import evidence
from kdk_bench.operator_docs import pages
from kdk_bench.operator_docs.__main__ import main
from kdk_bench.operator_docs.limits import refusals

LACKING = [why for language in LANGUAGES.values() if (why := language.module("launch").missing("cpu"))]
pytestmark = pytest.mark.skipif(bool(LACKING), reason="; ".join(LACKING))


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    return pages.files()


def test_the_committed_files_are_up_to_date(wanted: dict[str, str]) -> None:
    assert not pages.stale(wanted), "run `python -m kdk_bench.operator_docs`"
    assert {f"docs/operators/{op.name}.md" for op in pages.own()} < set(wanted)


def test_stale_is_what_says_something_else(wanted: dict[str, str], tmp_path: Path) -> None:
    pages.write(wanted, tmp_path)
    assert not pages.stale(wanted, tmp_path)
    page = tmp_path / "docs/operators/rms_norm.md"
    text = page.read_text()
    page.write_text(text.replace("2026-", "2025-").replace("* python 3", "* python 4"))
    assert page.read_text() != text and not pages.stale(wanted, tmp_path)
    page.write_text(text.replace("eps: float", "eps: int"))
    (tmp_path / "docs/operators/gone.md").write_text("of an operator that is gone")
    assert pages.stale(wanted, tmp_path) == ["docs/operators/rms_norm.md", "docs/operators/gone.md"]
    pages.write(wanted, tmp_path)
    assert not pages.stale(wanted, tmp_path)


def test_the_command_exits_1_on_a_stale_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "files", lambda: {"docs/operators/a.md": "text"})
    monkeypatch.setattr(pages, "stale", lambda wanted: list(wanted))
    done = CliRunner().invoke(main, ["--check"])
    assert done.exit_code == 1 and "stale: docs/operators/a.md" in done.output
    monkeypatch.setattr(pages, "stale", lambda wanted: [])
    assert CliRunner().invoke(main, ["--check"]).exit_code == 0


def record(**changes: Any) -> dict[str, Any]:
    usual = {"op": "rms_norm", "implementation": "triton", "direction": "forward", "target": "sm_90", "report": "check",
             "evidence": "simulated", "environment": {"torch": "2.13.0"}, "date": "2026-01-02"}  # fmt: skip
    return {**usual, **changes}


RECORDS = [
    record(dtypes={"float32": {"error_ratio": 0.321, "results": 12}}),
    record(evidence="measured", dtypes={"float32": {"error_ratio": 0.654, "results": 12}}),
    record(report="bench", evidence="modelled", implementation="pallas", target="v6e", ratios={"roofline": 1.25}, case="a-model",
           dtype="bfloat16", seconds=2e-6),
    record(report="bench", evidence="measured", ratios={"eager": 0.5}, case="a-model", dtype="bfloat16", seconds=3e-6),
    record(op="a-model: MLP", report="bench", evidence="modelled", implementation="kdk, every kernel", target="v6e",
           ratios={"without kdk": 0.9}, case="a-model", dtype="bfloat16", seconds=4e-6, operators=["rms_norm"]),
]  # fmt: skip


def test_what_a_page_says_of_records() -> None:
    text = pages.page(OPERATORS["rms_norm"].op, RECORDS)
    lines = text.splitlines()
    assert "| triton | forward | sm_90 | at most 1 | 0.32 (12) | unknown | unknown | 2026-01-02 |" in lines
    assert "| triton | forward | sm_90 | at most 1 | 0.65 (12) | unknown | unknown | 2026-01-02 |" in lines
    assert "| pallas | forward | v6e | a-model | bfloat16 | 2 us | 1.25 | 2026-01-02 |" in lines
    assert "| triton | forward | sm_90 | a-model | bfloat16 | 3 us | 0.50 | 2026-01-02 |" in lines
    assert "| a-model: MLP, kdk, every kernel | forward | v6e | a-model | bfloat16 | 4 us | 0.90 | 2026-01-02 |" in lines
    promise = next(line for line in lines if line.startswith("| triton (NVIDIA and AMD GPUs) | forward"))
    assert promise.endswith("| results, simulated: sm_90; results, measured: sm_90 |")  # a measured time is not in it
    assert sum(line == "simulated:" for line in lines) == 1 and sum(line == "measured:" for line in lines) == 2
    assert "Unknown, as the store has no record that holds: nki forward, nki backward, pallas forward" in text
    assert "the store has no block" not in text and "* torch 2.13.0" in lines


def test_a_page_without_records_is_unknown_throughout() -> None:
    text = pages.page(OPERATORS["rms_norm"].op, [])
    assert "0." not in text.partition("## Accuracy")[2] and text.count("the store has no record that holds") >= 8
    row = pages.table([OPERATORS["rms_norm"].op], []).splitlines()[-1]
    assert "| nki, pallas, triton, forward and backward | results unknown: no check that holds |" in row


def test_what_chips_refuse_is_what_supports_says() -> None:
    found = {(r.implementation, r.direction, r.targets, r.dtypes, r.reason) for r in refusals(OPERATORS["rms_norm_dynamic_quant"].op)}
    every = ("float32", "bfloat16", "float16")
    assert ("triton", "forward", ("sm_80",), every, "sm_80 has no float8_e4m3fn; float8_e5m2 and int8 work") in found
    assert any(row[:3] == ("nki", "forward", ("trn3",)) and "whole rows fit SBUF up to H = " in row[4] for row in found)


def test_sizes_are_asked_beyond_those_that_checks_draw() -> None:
    found = refusals(OPERATORS["router_topk"].op)
    reasons = {r.implementation: r.reason for r in found if r.direction == "forward" and "float32" in r.dtypes}
    assert "columns of experts fit VMEM up to E = " in reasons["pallas"] and "rows of experts fit SBUF up to E = " in reasons["nki"]


def test_a_later_failure_takes_evidence_away(tmp_path: Path) -> None:
    def result(outcome: str, direction: str) -> dict[str, Any]:
        usual = record(direction=direction, outcome=outcome, dtype="float32", error_ratio=0.5)
        return {name: value for name, value in usual.items() if name != "report"}

    store = tmp_path / "evidence.json"
    both = [result("passed", "forward"), result("passed", "backward")]
    assert evidence.add({"schema": "kdk.check/1", "results": both}, store) == 2
    assert evidence.add({"schema": "kdk.check/1", "results": [result("failed", "backward")]}, store) == 0
    assert evidence.add({"schema": "kdk.check/1", "results": [result("unknown", "forward")]}, store) == 0
    assert [r["direction"] for r in json.loads(store.read_text())["records"]] == ["forward"]
