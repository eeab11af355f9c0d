"""A kernel's algorithm left to XLA (an operator's xla.py), which `kdk bench` shows beside the kernel: it computes the operator."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import kdk.ops  # noqa: F401
from kdk.cases import Case
from kdk.indices import Indices
from kdk.registry import OPERATORS
from kdk_bench.benchmarking.measuring import problem_of
from kdk_bench.declared_cases import cases_of
from kdk_bench.expectation import Expectation, Row

if importlib.util.find_spec("jax") is None:
    pytest.skip("jax computes them", allow_module_level=True)
from kdk.backends.pallas.launch import prepare

prepare()
import jax  # noqa: E402

from kdk.backends.pallas.simulate import to_jax, to_torch  # noqa: E402
from kdk_bench.modelled.pallas import left_to_xla  # noqa: E402

SIZES = {"N": 24, "E": 16, "K": 3, "T": 37, "B": 2, "D": 8, "H": 20, "V": 9000}  # more columns than two parts of the vocabulary
HAVE = [name for name, operator in OPERATORS.items() if left_to_xla(operator.op, "forward")]


def scalars_of(name: str) -> list[Case]:
    """The models' cases that differ in more than their sizes, cut."""
    seen = {str(sorted(case.scalars.items())): case for case in reversed(cases_of(OPERATORS[name].op).models)}
    return [Case(case.name, {letter: SIZES[letter] for letter in case.sizes}, case.scalars) for case in seen.values()]


def test_the_algorithmic_operators_of_the_table_have_one() -> None:
    assert set(HAVE) >= {"router_topk", "linear_recurrence", "linear_cross_entropy", "sample_top_k_top_p"}
    assert left_to_xla(OPERATORS["rms_norm"].op, "forward") is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name, case", [pytest.param(n, c, id=f"{n}-{c.name}") for n in HAVE for c in scalars_of(n)])
def test_it_computes_the_operator(name: str, case: Case, dtype: str) -> None:
    op = OPERATORS[name].op
    expected = Expectation(OPERATORS[name], Row(name, "forward", "pallas", "v6e", dtype), problem_of(op, case, case.sizes), 0)
    function = left_to_xla(op, "forward")
    assert function is not None
    args = [to_jax(a) if isinstance(a, torch.Tensor) else a for a in Indices(op, "forward").narrowed(expected.call.args)]
    with jax.default_device(jax.devices("cpu")[0]):
        results = function(*args)
    found = tuple(to_torch(r) for r in (results if isinstance(results, tuple) else (results,)))
    reason, _, telling = expected.judge(found, {})
    assert not reason and telling
