"""Every kernel that declares launch parameters is right with the extreme ones, in the simulator."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch

from kdk import dispatch, tuning
from kdk.backends import LANGUAGES
from kdk.indices import Indices
from kdk.registry import OPERATORS
from kdk_bench.benchmarking.measuring import problem_of
from kdk_bench.declared_cases import cases_of
from kdk_bench.expectation import Expectation, Row

TARGETS = {"pallas": "v6e", "triton": "sm_90"}
ABSENT = {language: LANGUAGES[language].module("launch").missing("cpu") for language in TARGETS}
LARGEST = 160  # of a letter: more than one block of 128, and a part of one
FEW = {"B": 2, "G": 2, "Hq": 2, "Hk": 2, "K": 4}  # batches, groups, heads, chosen: they cost time and are no block's
# linear_cross_entropy: with a longer H some float32 gradients of this case are past the limit (up to 1.3 times) with the kernel's own
# choice too, which says nothing about launch parameters. The others: so that there is more than one tile.
OWN = {
    "linear_cross_entropy": {"H": 32},
    "sample_top_k_top_p": {"N": 10, "V": 1500},
    "gather_rows": {"R": 60, "H": 300},
    "scatter_add_rows": {"R": 60, "H": 300},
}


@functools.cache
def expected(name: str, direction: str) -> Expectation:
    """Of the operator's primary case, made small; in float32."""
    op = OPERATORS[name].op
    case = cases_of(op).models[0]
    sizes = {letter: min(size, FEW.get(letter, LARGEST)) for letter, size in case.sizes.items()} | OWN.get(name, {})
    return Expectation(OPERATORS[name], Row(name, direction, "reference", "cpu", "float32"), problem_of(op, case, sizes), 0)


def kernels() -> list[Any]:
    """(operator, direction, language) of all that have launch parameters."""
    found = []
    for name, operator in OPERATORS.items():
        for language, absent in ABSENT.items():
            for direction in ("forward", "backward"):
                if absent or operator.op.function(direction) is None:
                    continue
                LANGUAGES[language].module("launch").prepare()
                kernel = dispatch.load_kernel(operator.op, language, direction)
                if kernel and kernel.tunable:
                    found.append((name, direction, language))
    return found


@pytest.mark.parametrize("end", [min, max])
@pytest.mark.parametrize("name, direction, language", kernels())
def test_the_extreme_launch_parameters_are_right(
    name: str, direction: str, language: str, end: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at their smallest, or all at their largest value; those alone that the kernel takes together with the ones before."""
    if language == "pallas":  # values alone: to look for faults takes most of the time
        monkeypatch.setattr(LANGUAGES[language].module("simulate"), "look_for_faults", lambda *args: None)
    op, target, wanted = OPERATORS[name].op, TARGETS[language], expected(name, direction)
    kernel = dispatch.load_kernel(op, language, direction)
    assert kernel is not None
    args = kernel.arguments(*Indices(op, direction).narrowed(wanted.call.args))
    parameters: dict[str, Any] = {}
    for parameter, values in kernel.tunable.items():
        taken = [value for value in values if not kernel.refuses(target, {**parameters, parameter: value}, args)]
        parameters[parameter] = end(taken)
    results = LANGUAGES[language].module("simulate").run_simulated(kernel.configured(parameters), args, target)
    results = results if isinstance(results, tuple) else (results,)
    reason, _, telling = wanted.judge(tuple([t.cpu() if isinstance(t, torch.Tensor) else t for t in results]), {})
    assert not reason and telling, reason


# ---- the smallest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", list(LANGUAGES))
def test_the_first_legal_values_are_the_smallest(language: str) -> None:
    if LANGUAGES[language].module("launch").missing("cpu"):
        pytest.skip(f"{language} is not installed")
    LANGUAGES[language].module("launch").prepare()
    for name, operator in OPERATORS.items():
        for direction in ("forward", "backward"):
            kernel = dispatch.load_kernel(operator.op, language, direction) if operator.op.function(direction) else None
            for parameter, values in (kernel.tunable if kernel else {}).items():
                assert list(values) == sorted(values), f"{name}.{direction} {language}: {parameter}"


def test_the_smallest_are_those_that_the_kernel_takes() -> None:
    taken: list[dict[str, Any]] = []

    def supports(target: str, x: Any, *, rows: int, warps: int) -> str | None:
        taken.append({"rows": rows, "warps": warps})
        return None if rows * warps >= 4 else "too few"

    module = types.ModuleType("kernels")
    module.TUNABLE = {"rows": (1, 2), "warps": (1, 2)}  # type: ignore[attr-defined]
    kernel = dispatch.Kernel(module, "forward", supports, lambda *args: args)
    found = tuning.launch_parameters(OPERATORS["rms_norm"].op, "forward", "v6e", kernel, pytest.fail)
    assert found((None,)) == {}
    with tuning.smallest():
        assert found((None,)) == {"rows": 2, "warps": 2}
        assert taken[0] == {"rows": 1, "warps": 1} and len(taken) == 4
    assert found((None,)) == {}


@pytest.mark.skipif(bool(ABSENT["triton"]), reason=str(ABSENT["triton"]))
def test_a_case_runs_with_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    from kdk_bench.check import Row, run_row
    from kdk_bench.places import place

    kernel = dispatch.load_kernel(OPERATORS["rms_norm"].op, "triton", "forward")
    assert kernel is not None
    real, seen = kernel.module.forward, []

    def forward(*args: Any, elements: int | None = None, warps: int | None = None) -> Any:
        seen.append((elements, warps))
        return real(*args, elements=elements, warps=warps)

    monkeypatch.setattr(kernel.module, "forward", forward)
    row = Row("rms_norm", "forward", "triton", "sm_90", "float32")
    (result, *_) = run_row(row, place("triton", "sm_90"), case="long reduction in the smallest steps")
    first = tuple(values[0] for values in kernel.tunable.values())
    assert (result.outcome, set(seen)) == ("passed", {first})
    (result, *_) = run_row(row, place("triton", "sm_90"), case="plain")
    assert (result.outcome, set(seen)) == ("passed", {first, (None, None)})
