"""router_topk: what is particular to it. The checks that hold for every operator run elsewhere."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import kdk
import kdk.ops
from kdk.errors import InputError
from kdk_kernels.router_topk import cases, choice, patterns
from kdk_kernels.router_topk.reference import router_topk, router_topk_backward

KERNELS = ("triton", "pallas", "nki")
IMPLEMENTATIONS = ("reference", *KERNELS)
INF, NAN = float("inf"), float("nan")
DEEPSEEK: dict[str, Any] = {"scoring": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5}
TOLERANCE = 1e-6


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def forward(implementation: str, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
    with kdk.use(implementation), kdk.strict():
        return kdk.ops.router_topk(*args, **more)


def gradient(implementation: str, grad: Tensor, logits: Tensor, k: int, **more: Any) -> Tensor:
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad(forward(implementation, logits, k, **more)[0], logits, grad)[0]


def close(got: Tensor, want: Tensor, rtol: float = 4e-6) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize(("spelling", "scalars"), patterns.SPELLINGS, ids=[s.__name__ for s, _ in patterns.SPELLINGS])
def test_spellings_equal_the_reference(spelling: Any, scalars: dict[str, Any]) -> None:
    logits, bias = randn(3, 7, 24, dtype=torch.float64) * 2, randn(24, seed=1, dtype=torch.float64) / 4
    weights, indices = router_topk(logits, 3, bias=bias if "groups" in scalars else None, **scalars)
    want, at = spelling(logits, 3, bias)
    torch.testing.assert_close(weights, want, rtol=1e-14, atol=0.0)
    assert torch.equal(indices.long(), at)


@pytest.mark.parametrize(("scoring", "renormalize"), list(itertools.product(("softmax", "sigmoid"), (True, False))))
@pytest.mark.parametrize("k", [1, 3, 12])
def test_backward_is_the_derivative(scoring: str, renormalize: bool, k: int) -> None:
    logits, grad = randn(5, 12, dtype=torch.float64).requires_grad_(), randn(5, k, seed=1, dtype=torch.float64)
    weights, indices = router_topk(logits, k, scoring, renormalize=renormalize, scale=2.5)
    (want,) = torch.autograd.grad(weights, logits, grad)
    got = router_topk_backward(grad, None, logits.detach(), indices, scoring, renormalize, 2.5, "logits")
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ties_go_to_the_lowest_index(implementation: str) -> None:
    logits = (randn(9, 19) * 2).round()
    logits[1] = torch.tensor([0.0, -0.0, 1.0, -0.0, 0.0, -1.0, 0.0, -0.0, 0.0] + [-5.0] * 10)
    order = sorted(range(19), key=lambda e: (-logits[0, e].item(), e))
    indices = forward(implementation, logits, 11)[1]
    assert indices[0].tolist() == order[:11]
    assert indices.dtype == torch.int32
    assert indices[1].tolist() == [2, 0, 1, 3, 4, 6, 7, 8, 5, 9, 10]
    assert torch.equal(indices, router_topk(logits, 11)[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_groups(implementation: str) -> None:
    """Group 1 has the best expert, groups 0 and 2 the best pairs; equal groups go to the lowest index; three are in no tile."""
    logits = torch.full((2, 15), -4.0)
    logits[0, [1, 3]], logits[0, 5], logits[0, [10, 14]] = 1.0, 2.0, 1.5
    weights, indices = forward(implementation, logits, 5, "sigmoid", 3, 2, renormalize=False)
    assert indices.tolist() == [[10, 14, 1, 3, 0], [0, 1, 2, 3, 4]]
    close(weights, torch.sigmoid(logits.double()).gather(-1, indices.long()))
    # All of the groups are no limit, in any number that divides the experts.
    assert torch.equal(forward(implementation, logits, 5, "softmax", 5, 5)[1], router_topk(logits, 5)[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_bias_picks_and_the_score_weighs(implementation: str, scoring: str) -> None:
    logits = randn(6, 16)
    bias = torch.zeros(16)
    bias[[3, 8]] = torch.tensor([5.0, 7.0])
    weights, indices = forward(implementation, logits, 2, scoring, bias=bias, renormalize=False, scale=2.0)
    assert indices.tolist() == [[8, 3]] * 6
    scores = torch.softmax(logits.double(), -1) if scoring == "softmax" else torch.sigmoid(logits.double())
    close(weights, 2 * scores[:, [8, 3]])
    assert torch.equal(bias[[3, 8]], torch.tensor([5.0, 7.0]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_saturated_sigmoids(implementation: str) -> None:
    """Scores that all round to 1, or to 0: the logits rank; weights and gradients are numbers."""
    logits = torch.cat([torch.arange(20.0, 32.0)[None], torch.arange(-212.0, -200.0)[None]])
    weights, indices = forward(implementation, logits, 4, "sigmoid")
    assert indices.tolist() == [[11, 10, 9, 8]] * 2
    close(weights, torch.tensor([[0.25] * 4, [0.0] * 4]))
    if implementation == "reference":  # differentiated by torch, with 1 - sigmoid
        return
    got = gradient(implementation, randn(2, 4), logits, 4, scoring="sigmoid")
    want = router_topk_backward(randn(2, 4).double(), None, logits.double(), indices, "sigmoid", True, 1.0, "logits")
    torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=1e-16)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("experts", [1, 13, *(pytest.param(e, marks=pytest.mark.slow) for e in (3, 8, 40))])
def test_every_expert_and_one_row(implementation: str, experts: int) -> None:
    logits = randn(experts, seed=experts)
    weights, indices = forward(implementation, logits, experts)
    assert torch.equal(indices, router_topk(logits, experts)[1])
    close(weights, torch.softmax(logits.double(), -1).gather(-1, indices.long()))
    grad = randn(experts, seed=1)
    want = router_topk_backward(grad.double(), None, logits.double(), indices, "softmax", True, 1.0, "logits")
    torch.testing.assert_close(gradient(implementation, grad, logits, experts).double(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty(implementation: str) -> None:
    logits = torch.empty(2, 0, 16, requires_grad=True)
    with kdk.use(implementation):
        weights, indices = kdk.ops.router_topk(logits, 4)
    assert weights.shape == indices.shape == (2, 0, 4)
    assert torch.autograd.grad(weights.sum(), logits)[0].shape == logits.shape


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_and_infinities(implementation: str) -> None:
    rows = [[1.0, NAN, 3.0, INF, -INF, 0.0, 2.0, -INF], [-INF] * 8, [-INF, 2.0, -INF, 2.0, -INF, -INF, -INF, -INF]]
    logits = torch.tensor(rows)
    weights, indices = forward(implementation, logits, 4)
    assert indices.tolist() == [[1, 3, 2, 6], [0, 1, 2, 3], [1, 3, 0, 2]]
    close(weights, torch.tensor([[NAN] * 4, [NAN] * 4, [0.5, 0.5, 0.0, 0.0]]))
    weights, indices = forward(implementation, logits, 4, "sigmoid", renormalize=False)
    assert indices.tolist() == [[1, 3, 2, 6], [0, 1, 2, 3], [1, 3, 0, 2]]
    close(weights, torch.sigmoid(logits.double()).gather(-1, indices.long()))


@pytest.mark.parametrize("implementation", KERNELS)  # the reference is differentiated by torch, which takes the difference
def test_nearly_one_weight(implementation: str) -> None:
    """Where one softmax weight is nearly 1, its gradient is the small rest of a difference."""
    logits, grad = torch.zeros(2, 16), torch.tensor([[1.0, 1.5, -2.0]] * 2)
    logits[:, [2, 5, 7]] = torch.tensor([20.0, 2.0, 1.0])
    for renormalize in (True, False):
        at = router_topk(logits, 3)[1]
        want = router_topk_backward(grad.double(), None, logits.double(), at, "softmax", renormalize, 1.0, "logits")
        got = gradient(implementation, grad, logits, 3, renormalize=renormalize)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=0.0)  # of the ScalarE exponential, beside rounding


def arguments(logits: Tensor, **more: Any) -> dict[str, Any]:
    given = {"scoring": "softmax", "groups": None, "top_groups": None, "bias": None, "renormalize": True, "scale": 1.0}
    return {"logits": logits, **given, **more}


def is_valid(logits: Tensor, indices: list[int] | Tensor, **more: Any) -> bool:
    at = indices if isinstance(indices, Tensor) else torch.tensor([indices], dtype=torch.int32)
    return bool(choice.valid(arguments(logits, k=at.shape[-1], **more), {"indices": at}, TOLERANCE).all())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_expert_renormalized_has_a_weight_of_one(implementation: str) -> None:
    """The check draws no such case: its gradient is rounding errors alone."""
    logits = randn(7, 513).requires_grad_()
    weights, indices = forward(implementation, logits, 1, renormalize=True)
    weights.sum().backward()
    assert torch.equal(indices[:, 0].long(), logits.argmax(-1)) and weights.detach().sub(1).abs().max() < 1e-6
    assert logits.grad is not None and logits.grad.abs().max() < 1e-6


def test_what_is_a_right_choice() -> None:
    logits = torch.tensor([[3.0, 1.0, 3.0, 2.0, 0.0, 1.0]])
    assert is_valid(logits, [0, 2, 3, 1])
    for wrong in ([2, 0, 3, 1], [0, 2, 3, 5], [0, 2, 1, 3], [0, 2, 3, 4], [0, 0, 2, 3], [0, 2, 3, 6], [-1, 0, 2, 3]):
        assert not is_valid(logits, wrong), wrong
    near = torch.tensor([[1.0, 1.0 + 1e-7, 0.0, 0.5]], dtype=torch.float64)
    bias = torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64)
    assert not is_valid(near, [0, 1])  # without a bias nothing is rounded
    assert is_valid(near, [0, 1], bias=bias) and is_valid(near, [1, 0], bias=bias)
    assert not is_valid(near, [0, 3], bias=bias)


def test_a_nan_and_an_infinity_are_ranked_alike_only_without_a_bias() -> None:
    """With one, a NaN stays before all, and sigmoid(inf) + bias is an ordinary number."""
    logits, bias = torch.tensor([[INF, NAN, 0.0]]), torch.tensor([1.0, 1.0, 0.0])
    for given, first in ((bias, [1, 0]), (None, [0, 1])):
        _, indices = kdk.ops.router_topk(logits, 2, scoring="sigmoid", bias=given)
        assert indices.tolist() == [first]
        arguments = {"logits": logits.double(), "bias": given, "scoring": "sigmoid", "groups": None, "top_groups": None}
        assert choice.valid(arguments, {"indices": indices}, 1e-6).all()
        assert not choice.valid(arguments, {"indices": indices.flip(-1)}, 1e-6).any()


def test_what_is_a_right_choice_of_groups() -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0, -3.0, 2.0, 2.0, 0.0, 1.0]])
    more = {"scoring": "sigmoid", "groups": 4, "top_groups": 1}
    assert is_valid(logits, [4, 5], **more)
    assert not is_valid(logits, [2, 3], **more) and not is_valid(logits, [1, 0], **more)
    assert not is_valid(logits, [2, 4], **more)
    equal = torch.tensor([[1.0, 0.0, 2.0, 1.0, 2.0, 1.0, 0.0, 0.0]])
    assert is_valid(equal, [2, 3], **more) and not is_valid(equal, [4, 5], **more)
    two = {**more, "top_groups": 2}
    assert is_valid(equal, [2, 4, 3], **two) and not is_valid(equal, [2, 3, 4], **two)
    assert not is_valid(equal, [2, 3, 0], **two)
    near = torch.tensor([[2.0, 1.0, 2.0, 1.0 + 1e-7, 2.0, 1.0 + 2e-7, 0.0, 0.0]], dtype=torch.float64)
    assert all(is_valid(near, at, **more) for at in ([0, 1], [2, 3], [4, 5]))


BIAS = {"bias": randn(24, seed=3) / 8}


@pytest.mark.parametrize("scalars", [{}, {"scoring": "sigmoid", **BIAS}, {**DEEPSEEK, **BIAS}])
def test_the_reference_is_right_and_its_neighbours_are_not(scalars: dict[str, Any]) -> None:
    logits = randn(40, 24)
    indices = router_topk(logits, 4, **scalars)[1]
    wide = {n: t.double() if isinstance(t, Tensor) else t for n, t in arguments(logits.double(), k=4, **scalars).items()}
    assert choice.valid(wide, {"indices": indices}, TOLERANCE).all()
    swapped, next_best = indices[:, [0, 2, 1, 3]], router_topk(logits, 5, **scalars)[1][:, [0, 1, 2, 4]]
    for wrong in (swapped, next_best):
        assert not choice.valid(wide, {"indices": wrong}, TOLERANCE).any()


@pytest.mark.parametrize(
    ("scalars", "code"),
    [
        ({"k": 0}, "ROUTER-K"),
        ({"k": 17}, "ROUTER-K"),
        ({"scoring": "tanh"}, "ROUTER-SCORING"),
        ({"groups": 4}, "ROUTER-GROUPS"),
        ({"groups": 5, "top_groups": 2}, "ROUTER-GROUPS"),
        ({"groups": 16, "top_groups": 2}, "ROUTER-GROUPS"),
        ({"groups": 4, "top_groups": 5}, "ROUTER-TOP-GROUPS"),
        ({"groups": 8, "top_groups": 1}, "ROUTER-K"),
        ({"bias": torch.zeros(15)}, "ROUTER-BIAS"),
    ],
)
def test_what_is_refused(scalars: dict[str, Any], code: str) -> None:
    with pytest.raises(InputError) as caught:
        kdk.ops.router_topk(randn(2, 16), **{"k": 4, **scalars})
    assert caught.value.code == code


def test_models_are_valid() -> None:
    usual = {name: values[0] for name, values in cases.CASES.scalars.items()}
    for case in cases.CASES.models:
        assert cases.valid(dict(case.sizes), {**usual, **case.scalars}), case.name
