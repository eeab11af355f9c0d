"""What is particular to rms_norm: the Triton backward has a kernel of its own for rows that are long and still fit one program."""

from __future__ import annotations

import pytest

from kdk.registry import OPERATORS, require
from kdk_bench.check import run_case
from kdk_bench.expectation import Row
from kdk_bench.generate import Problem
from kdk_bench.places import place

require(["rms_norm", "add_rms_norm"])
H = 8192 + 77  # more than a program holds beside its share of dweight


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
@pytest.mark.parametrize("dtype, layout", [("float32", "strided"), ("bfloat16", "contiguous")])
def test_backward_of_long_rows_with_a_weight(op: str, dtype: str, layout: str) -> None:
    rows = 11  # the simulated GPU runs 8 programs: some take a second row
    operator = OPERATORS[op]
    needs = tuple(operator.op.uses)
    problem = Problem("long rows", {"N": rows, "H": H}, {"N": (rows,)}, {"eps": 1e-5, "offset": 1.0}, layout=layout, needs=needs)
    row = Row(op, "backward", "triton", "sm_90", dtype)
    result = run_case(operator, row, problem, place("triton", "sm_90"), 0, {}, twice=False)
    assert result.outcome == "passed", result.reason
