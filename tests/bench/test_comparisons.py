"""Choices, quantised outputs, indices, optional tensors, layouts: wrong results of a kernel are refused, legitimate ones are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.inputs import toy_operators
from torch import Tensor

from kdk import registry
from kdk.errors import DeclarationError
from kdk_bench import generate
from kdk_bench.declared_cases import cases_of
from kdk_bench.discrete import Dequantised, spread_over
from kdk_bench.drawing import draw
from kdk_bench.expectation import Expectation, Row
from kdk_bench.generate import Problem, problems


@pytest.fixture(autouse=True, scope="module")
def toys() -> Iterator[None]:
    registry.OPERATORS.update(toy_operators())
    yield
    for name in toy_operators():
        del registry.OPERATORS[name]


def problem(name: str, case: str = "plain", **changes: Any) -> Problem:
    found = {p.name: p for p in problems(toy_operators()[name].op, "forward")}[case]
    return dataclasses.replace(found, **changes)


def expectation(name: str, dtype: str = "float32", direction: str = "forward", **changes: Any) -> Expectation:
    return Expectation(toy_operators()[name], Row(name, direction, "torch", "cpu", dtype), problem(name, **changes), 0)


def verdict(expected: Expectation, *results: Tensor) -> str:
    return expected.judge(results, {})[0]


def right(expected: Expectation) -> list[Tensor]:
    return [t.clone() for t in expected.reference if t is not None]


# ---- a choice ---------------------------------------------------------------------------------------------------------


def routed(**given: Any) -> Expectation:
    return expectation("route", sizes={"N": 40, "K": 4, "E": 32}, lead={"N": (40,)}, scalars=SCALARS, **given)


SCALARS = {"k": 4, "scale": None, "kind": "softmax"}


def test_the_reference_s_choice_passes_and_tells() -> None:
    expected = routed()
    assert expected.sloppy() is None
    assert expected.judge(tuple(right(expected)), {}) == ("", pytest.approx(0, abs=0.6), True)


def test_another_expert_is_refused() -> None:
    expected = routed()
    weights, experts, scores = right(expected)
    experts[7, 3] = next(e for e in range(32) if e not in experts[7].tolist())
    weights[7, 3] = scores[7, int(experts[7, 3])]
    assert "experts: 1 of 40 rows choose wrongly, the first at (7,)" in verdict(expected, weights, experts, scores)


@pytest.mark.parametrize(("value", "reason"), [(33, "cannot be read"), (-1, "cannot be read")])
def test_a_choice_out_of_range_is_refused(value: int, reason: str) -> None:
    expected = routed()
    weights, experts, scores = right(expected)
    experts[0, 0] = value
    assert reason in verdict(expected, weights, experts, scores)


def test_the_same_expert_twice_and_indices_off_by_one_are_refused() -> None:
    expected = routed()
    weights, experts, scores = right(expected)
    assert "choose wrongly" in verdict(expected, weights, experts[:, :1].expand(-1, 4).contiguous(), scores)
    assert "choose wrongly" in verdict(expected, weights, (experts + 1) % 32, scores)


def test_weights_of_another_choice_are_refused() -> None:
    expected = routed()
    weights, experts, scores = right(expected)
    assert verdict(expected, weights.flip(-1), experts, scores).startswith("weights: worst error")
    assert verdict(expected, weights, experts.long(), scores).startswith("experts: torch.int64")


def with_two_scores(gap: float) -> Expectation:
    """The scores of experts 5 and 9 are the largest of every row, `gap` apart."""
    expected = routed()
    x = expected.call.args[0]
    x[:, 5], x[:, 9] = 8.0, 8.0 + gap

    class Drawn(Expectation):
        pass

    operator = toy_operators()["route"]
    original = draw
    import kdk_bench.expectation as module

    def drawn(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return dataclasses.replace(found, tensors={"x": x, "bias": None})

    module.draw = drawn  # type: ignore[assignment]
    try:
        return Drawn(operator, expected.row, expected.problem, 0)
    finally:
        module.draw = original


@pytest.mark.parametrize(("gap", "may"), [(0.0, False), (1e-6, True), (1e-2, False)])
def test_two_experts_in_the_other_order(gap: float, may: bool) -> None:
    """Of an exact tie the lowest number comes first; a rounding apart either may; further apart the larger must."""
    expected = with_two_scores(gap)
    assert expected.sloppy() is None
    _, experts, scores = right(expected)
    assert experts[0, :2].tolist() == ([5, 9] if gap == 0 else [9, 5])
    swapped = experts.clone()
    swapped[:, :2] = experts[:, :2].flip(-1)
    weights = scores.gather(-1, swapped.long())
    reason = verdict(expected, weights, swapped, scores)
    assert (reason == "") == may and (may or "40 of 40 rows choose wrongly" in reason), reason
    if may:  # and the weights must be those of the kernel's own choice
        assert verdict(expected, weights * 1.001, swapped, scores).startswith("weights:")


def test_a_reference_that_chooses_wrongly_fails_its_own_check() -> None:
    expected = routed()
    assert expected.choice is not None
    nothing = dataclasses.replace(expected.choice, valid=lambda *a: torch.zeros(40, dtype=torch.bool))
    expected.choice = nothing
    assert "the reference fails its own check" in str(expected.sloppy())


def test_the_backward_gets_one_choice_in_all_precisions() -> None:
    expected = expectation("route", "bfloat16", "backward", sizes={"N": 40, "K": 4, "E": 32}, lead={"N": (40,)}, scalars=SCALARS)
    grad, no_grad, experts = expected.call.args[:3]
    assert no_grad is None and experts.dtype == torch.int32 and torch.equal(experts, expected.wide[2])
    assert grad.dtype == torch.bfloat16 and expected.wide[3].dtype == torch.float64 and expected.sloppy() is None


# ---- quantised --------------------------------------------------------------------------------------------------------


def quantised(dtype: str, working: str = "float32") -> Expectation:
    return expectation("quantise", working, sizes={"N": 40, "H": 200}, lead={"N": (40,)}, scalars={"dtype": dtype})


def raised(q: Tensor, by: int) -> Tensor:
    """The neighbours of numbers in their format."""
    if q.dtype == torch.int8:
        return (q.int() + by).clamp(-127, 127).to(torch.int8)
    return (q.view(torch.uint8) + by).view(q.dtype)


@pytest.mark.parametrize("working", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_quantised(dtype: str, working: str) -> None:
    expected = quantised(dtype, working)
    assert expected.sloppy() is None
    q, scale = right(expected)
    reason, ratio, telling = expected.judge((q, scale), {})
    assert reason == "" and ratio <= 1 and telling
    other = q.clone()
    other[3, 50] = raised(q[3, 50:51], 1)[0]
    assert "q: 1 of 8000 elements are not the nearest quantum, the worst at (3, 50)" in verdict(expected, other, scale)
    assert "are not the nearest quantum" in verdict(expected, q, scale * 1.01)
    assert verdict(expected, (q.double() / 2).to(q.dtype), scale * 2).startswith(("q:", "scale:"))
    assert verdict(expected, torch.zeros_like(q), scale).startswith("q:")


def test_one_quantum_off_at_a_tie_is_no_fault() -> None:
    values = torch.tensor([[0.5, 1.5, -2.5, 3.3, 127.0, -127.0, 140.0, 0.0]], dtype=torch.float64)
    scale, q = torch.ones(1), torch.tensor([[0, 2, -2, 3, 127, -127, 127, 0]], dtype=torch.int8)
    held = Dequantised(values, values.float(), None, q, scale, 1)
    assert held.judge(q, scale)[0].accepted
    other = torch.tensor([[1, 1, -3, 3, 127, -127, 127, 0]], dtype=torch.int8)
    verdict_, note = held.judge(other, scale)
    assert verdict_.accepted and note == "3 of 8 elements are a quantum from the oracle's"
    other[0, 3] = 4
    assert not held.judge(other, scale)[0].accepted
    assert held.informative()


def test_float8_quanta_differ_below_and_above_a_power_of_two() -> None:
    values = torch.tensor([[15.6, 16.9, 448.0, 500.0, -500.0]], dtype=torch.float64)
    scale, q = torch.ones(1), torch.tensor([[16.0, 16.0, 448.0, 448.0, -448.0]]).to(torch.float8_e4m3fn)
    assert Dequantised(values, values.float(), None, q, scale, 1).judge(q, scale)[0].accepted
    below = torch.tensor([[15.4, 16.9, 448.0, 500.0, -500.0]], dtype=torch.float64)  # 15 is nearer
    assert not Dequantised(below, below.float(), None, q, scale, 1).judge(q, scale)[0].accepted


def test_a_scale_shared_by_blocks() -> None:
    assert spread_over(torch.tensor([[1.0, 2.0]]), torch.Size((1, 5))).tolist() == [[1, 1, 1, 2, 2]]
    assert spread_over(torch.tensor([1.0, 2.0]), torch.Size((2, 3))).tolist() == [[1, 1, 1], [2, 2, 2]]


# ---- the generator ----------------------------------------------------------------------------------------------------


def test_the_patterns_of_indices() -> None:
    op = toy_operators()["row_loss"].op
    found = {}
    for p in problems(op, "forward"):
        target = draw(op, ("target",), p, torch.float32, 0).tensors["target"]
        assert target is not None and target.dtype in (torch.int64, torch.int32)
        ignored = target == p.scalars["ignore_index"]
        assert ((target >= 0) & (target < p.sizes["V"]) | ignored).all()
        found.setdefault(p.pattern, []).append((target, p, float(ignored.double().mean()) if target.numel() else 0.0))
    assert set(found) == {*generate.PATTERNS, "sentinel"}
    assert {p.index_dtype for rows in found.values() for _, p, _ in rows} == {"int64", "int32"}
    assert all(share == 1 for _, _, share in found["sentinel"]) and any(0 < share < 1 for _, _, share in found["random"])
    assert all(t.equal(t.sort().values) for t, p, _ in found["sorted"] if p.layout != "expanded")
    kept = [t[t != p.scalars["ignore_index"]].unique().numel() for t, p, _ in found["equal"]]
    assert max(kept) == 1


def test_optional_tensors_come_and_go() -> None:
    op = toy_operators()["add_bias"].op
    assert {p.without for p in problems(op, "backward")} == {(), ("bias",)}
    assert all("bias" not in p.needs and p.needs for p in problems(op, "backward") if p.without)


def test_a_letter_that_is_an_argument() -> None:
    for p in problems(toy_operators()["add_at"].op, "forward"):
        assert p.scalars["size"] == p.sizes["R"]


def test_combinations_that_are_not_valid_are_drawn_again() -> None:
    op = toy_operators()["route"].op
    assert all(p.sizes["K"] <= 16 for p in problems(op, "forward", full=True))
    nothing = dataclasses.replace(cases_of(op), valid=lambda sizes, scalars: False)
    with pytest.raises(DeclarationError, match="no valid sizes and scalars in 200 attempts"):
        generate._problem(op, nothing, generate.QUICK[0], "forward", 0, 1000, 0)


def test_letters_away_from_the_edge_are_not_tiny() -> None:
    op = toy_operators()["route"].op
    cases = cases_of(op)
    sizes = [p.sizes["E"] for turn, p in enumerate(problems(op, "forward")) if p.counted and turn % len(cases.dims) != 2]
    assert min(sizes) >= cases.dims["E"].at_least or max(sizes) > 100


def test_channels_last_is_tried_and_kept() -> None:
    expected = expectation("norm_groups", case="channels last")
    x = expected.call.args[0]
    assert x.dim() in (4, 5) and not x.is_contiguous()
    (y,) = right(expected)
    assert "the fake promises channels_last" in verdict(expected, y.contiguous())
    kept = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    assert verdict(expected, y.contiguous(memory_format=kept)) == ""
    ranks = {len(p.lead["P"]) for p in problems(toy_operators()["norm_groups"].op, "forward", full=True)}
    assert {1, 2, 3} <= ranks


def test_dtype_arguments_are_widened_for_the_oracle_unless_they_quantise() -> None:
    assert quantised("float8_e4m3fn").wide[1] == torch.float8_e4m3fn
