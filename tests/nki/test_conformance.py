"""The table of public kernels, on a checkout made for the test."""

import dataclasses

import numpy as np
import pytest

from kdk_bench import nki_conformance
from kdk_bench.nki_conformance_cases import CASES

KERNEL = """
import nki
import nki.language as nl

@nki.jit
def tensor_exp_kernel_(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.{function}(nl.load(x)))
    return out
"""
CASE = next(c for c in CASES if c.name == "layout-pass tensor_exp_kernel_")


def outcome(tmp_path, source, case=CASE):
    path = tmp_path / CASE.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return nki_conformance.run_case(tmp_path, case)


def test_outcomes(tmp_path):
    row = outcome(tmp_path, KERNEL.format(function="exp"))
    assert row["passed"] and row["outcome"] == "agrees" and row["instructions"] == 3
    row = outcome(tmp_path, KERNEL.format(function="square"))
    assert not row["passed"] and row["outcome"].startswith("differs by")
    row = outcome(tmp_path, KERNEL.format(function="no_such_function"))
    assert not row["passed"] and row["outcome"].startswith("refused: AttributeError")
    row = outcome(tmp_path, KERNEL.replace("nl.shared_hbm", "nl.hbm").format(function="exp"))
    assert not row["passed"] and row["outcome"].startswith("refused: [C15]")


@pytest.mark.parametrize(
    ("refused", "passed"),
    [("AttributeError: no_such", True), ("AttributeError: another", False), ("TypeError", False), ("C15", False)],
)
def test_a_refusal_is_the_one_that_is_expected(tmp_path, refused, passed):
    source = KERNEL.format(function="no_such_function")
    assert outcome(tmp_path, source, dataclasses.replace(CASE, refused=refused))["passed"] is passed


def test_an_accepted_case_that_should_be_refused_fails(tmp_path):
    assert not outcome(tmp_path, KERNEL.format(function="exp"), dataclasses.replace(CASE, refused="C15"))["passed"]


def test_names_are_unique():
    names = [(c.repository, c.name) for c in CASES]
    assert len(names) == len(set(names)) and len(names) > 50


@pytest.mark.parametrize(("got", "want"), [(np.ones(3), np.ones((3, 1))), ([np.ones(2), np.zeros(2)], (np.ones(2), np.zeros(2)))])
def test_compare_flattens(got, want):
    assert nki_conformance.compare(got, want, 0.0) == "agrees"


def test_compare_refuses_nan_and_missing_results():
    assert nki_conformance.compare(np.array([np.nan]), np.ones(1), 1.0) != "agrees"
    assert nki_conformance.compare(np.ones(1), (np.ones(1), np.ones(1)), 1.0) != "agrees"


def test_the_summary_says_what_became_of_the_cases():
    outcomes = ("agrees", "agrees", "runs", "refused as it should be (C24): reason", "differs by 1")
    rows = [{"outcome": o, "passed": o != "differs by 1", "changed": i == 1} for i, o in enumerate(outcomes)]
    text = nki_conformance.summary(rows)
    assert "5 cases: 2 agree with a reference (1 after a repair" in text
    assert "1 run without one, 1 refused as they should be, 1 fail" in text


def test_a_table_that_goes_to_a_file_is_not_folded(capsys):
    row = {"repository": "r", "kernel": "kernel[a long name, of] " + "x" * 20, "target": "trn2", "instructions": 1, "seconds": 0.1}
    nki_conformance.show([row | {"outcome": "agrees " + "y" * 30, "passed": True, "changed": False}])
    assert any(row["kernel"] in line and "y" * 30 in line for line in capsys.readouterr().out.splitlines())
