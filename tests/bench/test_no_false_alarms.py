"""The check refuses no legitimate kernel: the reference with its sums in another order, and in an algebraically equal form."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import kdk.ops  # noqa: F401  (registers the operators)
from kdk.dispatch import as_promised
from kdk.registry import OPERATORS
from kdk_bench.check import run_row
from kdk_bench.conditioning import MOVES, moved, reordered
from kdk_bench.expectation import Expectation, Row
from kdk_bench.generate import Problem, problems
from kdk_bench.numerics import SMALLEST_POOL, Pool
from kdk_bench.orders import Order, Reordered, backwards, in_lanes, sequential
from kdk_bench.places import place
from kdk_bench.shrinking import shrink
from kdk_bench.spelling import parse  # the lines that are printed use it too

BLOCK = 32
NAMES = [name for name, operator in OPERATORS.items() if operator.op.package.startswith("kdk_kernels.")]
CASES = 2000  # of each operator, over SEEDS
SEEDS = (1, 2, 3)


def blocked(x: np.ndarray) -> np.ndarray:
    return in_lanes(x, BLOCK)


def tree(x: np.ndarray) -> np.ndarray:
    while len(x) > 1:
        x = np.concatenate([x, np.zeros((len(x) % 2, *x.shape[1:]), x.dtype)])
        x = x[0::2] + x[1::2]
    return x[0]


class Rewritten(TorchFunctionMode):
    """Algebraically equal forms: products the other way round, quotients by reciprocals, exponentials of
    negative arguments alone."""

    def __init__(self) -> None:
        super().__init__()
        self.products: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        tensors = [a for a in args if isinstance(a, Tensor)]
        if not tensors or tensors[0].dtype != torch.float32:
            return func(*args, **(kwargs or {}))
        x = args[0]
        with torch._C.DisableTorchFunction():
            if name == "rsqrt":
                return 1 / x.sqrt()
            if name == "sigmoid":
                return torch.exp(x.clamp_max(0)) / (1 + torch.exp(-x.abs()))
            if name == "silu":
                return x / (1 + torch.exp(-x))
            if name == "square":
                return x * x
            if name == "softplus":
                return torch.log1p(torch.exp(-x.abs())) + x.clamp_min(0)
            if name in ("div", "__truediv__", "true_divide") and isinstance(args[1], Tensor):
                return x * (1 / args[1])
            if name in ("mul", "__mul__", "__rmul__"):
                return self._product(x, args[1])
        return func(*args, **(kwargs or {}))

    def _product(self, a: Tensor, b: Any) -> Tensor:
        """(p * q) * b as p * (q * b), where the first product stays within range."""
        result = a * b
        known = self.products.get(id(a))
        if known is not None and known[0] is a and isinstance(b, Tensor):
            _, p, q = known
            again = p * (q * b)
            if torch.equal(torch.isfinite(again), torch.isfinite(result)) and not (again == 0).logical_xor(result == 0).any():
                result = again
        if isinstance(b, Tensor):
            self.products[id(result)] = (result, a, b)
        return result


VARIANTS: dict[str, Callable[[], TorchFunctionMode]] = {
    "sequential": lambda: Reordered(sequential),
    "reversed": lambda: Reordered(backwards),
    "blocked": lambda: Reordered(blocked),
    "tree": lambda: Reordered(tree),
    "rewritten": Rewritten,
}


def judged(name: str, direction: str, dtype: str, problem: Problem, seed: int, variant: str, pools: dict[str, Pool]) -> str:
    """Why the check refuses the variant, or "". A reference that fails its own check is a refusal too."""
    operator = OPERATORS[name]
    expected = Expectation(operator, Row(name, direction, "triton", "sm_90", dtype), problem, seed)
    own_fault = expected.sloppy()
    if own_fault:
        return own_fault
    with VARIANTS[variant]():
        result = as_promised(operator.op, operator.op.function(direction))(*expected.call.args)
    return expected.judge(result if isinstance(result, tuple) else (result,), pools)[0]


def smaller(name: str, direction: str, dtype: str, problem: Problem, seed: int, variant: str, reason: str) -> str:
    """One line of this module that reproduces a refusal, on the smallest case found, and the reason."""
    op = OPERATORS[name].op
    words = shrink(op, problem, lambda p: bool(judged(name, direction, dtype, p, seed, variant, {}))).name
    return f"judged({name!r}, {direction!r}, {dtype!r}, parse(OPERATORS[{name!r}].op, {words!r}), {seed}, {variant!r}, {{}})  # {reason}"


def directions(name: str) -> list[str]:
    return [d for d in ("forward", "backward") if OPERATORS[name].op.function(d) is not None]


def refused_pools(pools: dict[tuple[str, ...], dict[str, Pool]]) -> list[str]:
    verdicts = [(*key, output, pool.verdict()) for key, own in pools.items() for output, pool in own.items()]
    return [str(v) for v in verdicts if v[-1] is not None and not v[-1].accepted]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_no_legitimate_variant_fails_the_quick_tier(name: str, variant: str) -> None:
    refused, pools = [], {}
    for direction, dtype in itertools.product(directions(name), ("float32", "bfloat16")):
        pool = pools.setdefault((direction, dtype), {})
        for problem in problems(OPERATORS[name].op, direction):
            reason = judged(name, direction, dtype, problem, 0, variant, pool)
            refused += [(direction, dtype, str(problem), reason)] if reason else []
    assert refused == []
    assert refused_pools(pools) == []


def drawn(name: str, seed: int) -> Iterator[tuple[str, str, Problem, int, str]]:
    """Endless random cases: the full tier's problems of ever new seeds, each with a direction, dtype and variant."""
    rng = random.Random(f"{name} {seed}")
    for round_ in itertools.count():
        own_seed = 1000 * seed + round_
        direction = directions(name)[round_ % len(directions(name))]
        for problem in problems(OPERATORS[name].op, direction, full=True, seed=own_seed):
            yield direction, rng.choice(OPERATORS[name].op.dtypes), problem, own_seed, rng.choice(list(VARIANTS))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_no_legitimate_variant_fails_at_random(name: str, seed: int) -> None:
    refused, pools = [], {}
    for direction, dtype, problem, own_seed, variant in itertools.islice(drawn(name, seed), -(-CASES // len(SEEDS))):
        pool = pools.setdefault((direction, dtype, variant), {})
        reason = judged(name, direction, dtype, problem, own_seed, variant, pool)
        refused += [smaller(name, direction, dtype, problem, own_seed, variant, reason)] if reason else []
    assert not refused, "\n".join(refused)
    assert refused_pools(pools) == []


@pytest.mark.parametrize(
    ("direction", "dtype", "words", "seed"),
    [
        ("forward", "float32", "plain #128: N=96 G=1 C=10 P=37 eps=1e-05", 1000),
        ("backward", "float32", "one more than a tile, expanded #113: N=28 G=71 C=71 P=5 eps=1e-05 layout=expanded", 2003),
        ("forward", "bfloat16", "long reduction, huge values #55: N=1 G=1 C=3477 P=8 eps=1e-05 values=huge needs=bias", 3002),
    ],
)
def test_sums_in_order_may_drift(direction: str, dtype: str, words: str, seed: int) -> None:
    """Equal terms round the same way each time, and a bias that cancels shows it: no floor by the number of terms foresees that."""
    problem = parse(OPERATORS["group_norm_silu"].op, words)
    assert not judged("group_norm_silu", direction, dtype, problem, seed, "sequential", {})


def test_a_value_near_a_tie_may_be_rounded_either_way() -> None:
    o = torch.full((SMALLEST_POOL,), 1 + 2**-11 - 2**-20, dtype=torch.float64)  # below the middle of two numbers of float16
    y = o.to(torch.float16)
    k = torch.full_like(y, 1 + 2**-10)
    for spread, accepted in ((2**-19, True), (2**-21, False)):
        pool = Pool()
        pool.add(k, y, o, torch.full_like(o, spread))
        assert pool._sums[torch.float16].kernel_off == (0 if accepted else o.numel())


@pytest.mark.parametrize("order", [sequential, backwards, blocked, tree])
def test_the_orders_sum(order: Order) -> None:
    x = np.random.default_rng(0).standard_normal((1000, 3)).astype(np.float32)
    total = order(x)
    assert total.dtype == np.float32
    assert np.abs(total - x.astype(np.float64).sum(0)).max() < 1e-3
    assert order(np.ones((1, 2), np.float32)).tolist() == [1, 1]


def test_the_variants_differ_from_the_reference() -> None:
    """A variant that computes exactly what the reference does would show nothing."""
    x = torch.randn(64, 1031, generator=torch.Generator().manual_seed(0))
    for variant in ("sequential", "reversed", "blocked", "tree"):
        with VARIANTS[variant]() as mode:
            total = x.square().mean(-1)
        assert mode.summed == 1 and not torch.equal(total, x.square().mean(-1)), variant
    with Rewritten():
        changed = [torch.sigmoid(x), torch.nn.functional.silu(x), x.abs().rsqrt(), x * x.sin() * x.cos(), x / x.exp()]
    plain = [torch.sigmoid(x), torch.nn.functional.silu(x), x.abs().rsqrt(), x * x.sin() * x.cos(), x / x.exp()]
    assert not any(torch.equal(a, b) for a, b in zip(changed, plain))


def test_a_refused_random_case_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIANTS, "half of it", lambda: Reordered(lambda x: tree(x[: len(x) // 2 or 1])))
    problem = problems(OPERATORS["rms_norm"].op, "forward", seed=5)[0]
    case = ("rms_norm", "forward", "float32", problem, 5, "half of it")
    line = smaller(*case, judged(*case, {}))
    assert "\n" not in line and "N=1 H=2 " in line
    assert eval(line)
    assert not eval(line.replace("half of it", "tree"))


def test_two_moves_never_cancel_in_all_moves() -> None:
    """Single elements of different arguments: every pair of signs comes."""
    one = torch.ones(1, dtype=torch.float64)
    up = [[bool(t > 1) for t in moved((one,) * 5, (one,) * 5, number)] for number in range(MOVES)]
    for i, j in itertools.combinations(range(5), 2):
        assert len({(move[i], move[j]) for move in up}) == 4


def test_an_expanded_element_moves_as_one() -> None:
    """Of rows that are all the same one, independent moves would cancel, and what hangs on them looked steadier than it is."""
    real = torch.ones(1, 8).expand(64, 8)
    rows = moved((real.double().contiguous(),), (real,), 3)[0]
    assert (rows == rows[:1]).all() and len(rows[0].unique()) == 2


@pytest.mark.parametrize("implementation", ["torch", "triton", "pallas", "nki"])
def test_rows_that_hang_on_a_single_number(implementation: str) -> None:
    """The gradient of a class that no row has is one probability times a row of x, and its error that of one logit. Right kernels
    were refused by up to 1.7 times the limit where the yardstick's own error of that logit happened to be small."""
    target = {"torch": "cpu", "triton": "sm_90", "pallas": "v6e", "nki": "trn2"}[implementation]
    row = Row("linear_cross_entropy", "backward", implementation, target, "float32")
    results = run_row(row, place(implementation, target), case="plain: N=160 H=160 V=160")
    assert [(r.outcome, r.reason) for r in results] == [("passed", "")]


def test_a_slice_in_which_every_order_was_lucky_is_judged_by_the_others() -> None:
    oracle = torch.linspace(1, 2, 320, dtype=torch.float64).reshape(20, 16)
    step = 1e-5 * oracle
    orders: list[Tensor | None] = [oracle + 3 * step, oracle - 3 * step]
    for order in orders:
        assert order is not None
        order[7] = oracle[7]
    moves: list[Tensor | None] = [oracle + step, oracle - step]
    spread = reordered(oracle, moves, orders)
    assert spread is not None and torch.allclose(spread, 3 * step)
    huge = 1e300 * oracle
    spread = reordered(huge, [1e300 * t for t in moves if t is not None], [1e300 * t for t in orders if t is not None])
    assert spread is not None and torch.allclose(spread / 1e300, 3 * step)


def test_a_result_far_steadier_than_its_rounding_is_no_measure() -> None:
    """Sums of a saturated result are a rounding off, which no move of the inputs explains: the next slice is not a thousand times off."""
    oracle = torch.ones(20, 16, dtype=torch.float64)
    moves: list[Tensor | None] = [oracle + 1e-12]
    moves[0][0] = oracle[0] + 1e-3  # type: ignore[index]
    spread = reordered(oracle, moves, [oracle + 1e-7])
    assert spread is not None and spread.max() < 1e-2
