"""sample_top_k_top_p: what is particular to it. The checks that hold for every operator run elsewhere."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import kdk
import kdk.ops
from kdk.errors import InputError
from kdk_kernels.sample_top_k_top_p import patterns
from kdk_kernels.sample_top_k_top_p.comparison import given, valid
from kdk_kernels.sample_top_k_top_p.reference import distribution, sample_top_k_top_p

KERNELS = ("triton", "pallas", "nki")
EVERY = pytest.mark.parametrize("implementation", ["reference", "torch", *KERNELS])
TOLERANCE = 2.0**-16  # the documented error
NAMES = ("logits", "uniform", "k", "p", "min_p", "temperature")


def logits(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sample(implementation: str, *args: Tensor | None) -> tuple[Tensor, Tensor]:
    """The operator itself: logits, uniform, k, p, min_p, temperature."""
    with kdk.use(implementation), kdk.strict():
        return kdk.registry.OPERATORS["sample_top_k_top_p"].call(*args)


def in_float64(*args: Tensor | None) -> dict[str, Any]:
    args = (*args, *[None] * (len(NAMES) - len(args)))
    return {name: a.double() if a is not None and a.is_floating_point() else a for name, a in zip(NAMES, args)}


def row(logit: list[float], u: float, k: int | None, p: float | None, min_p: float | None, temperature: float) -> tuple[int, float]:
    """The definition, one token after the other, in Python."""
    most = max(logit)
    scaled = [(x - most) / temperature for x in logit]
    weight = [math.exp(s) for s in scaled]
    kept = set(range(len(logit)))
    if k is not None and 0 < k < len(logit):
        kept = {i for i in kept if sum(x > logit[i] for x in logit) < k}
    if p is not None and p < 1:
        total = sum(weight[i] for i in kept)
        kept = {i for i in kept if logit[i] == most or sum(weight[j] for j in kept if logit[j] > logit[i]) < p * total}
    if min_p is not None:
        kept = {i for i in kept if weight[i] >= min_p}
    total, running = sum(weight[i] for i in kept), 0.0
    for i in sorted(kept):
        running += weight[i]
        if running > u * total:
            return i, math.log(weight[i] / total)
    raise AssertionError("u is below 1")


def test_reference_is_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-6, 7, (300, 11), generator=generator).double() / 2  # many ties
    u, p, min_p, temperature = (torch.rand(300, generator=generator, dtype=torch.float64) for _ in range(4))
    k = torch.randint(0, 13, (300,), generator=generator)
    temperature, min_p = temperature + 0.3, min_p / 3
    for filters in ((k, p, min_p), (k, None, None), (None, p, None), (None, None, min_p), (k, p, None), (None, None, None)):
        token, logprob = sample_top_k_top_p(x, u, *filters, temperature)
        for i in range(300):
            numbers = [None if f is None else f[i].item() for f in filters]
            expected, log_probability = row(x[i].tolist(), u[i].item(), *numbers, temperature[i].item())
            assert token[i] == expected and abs(logprob[i] - log_probability) < 1e-12


@pytest.mark.parametrize(("spelling", "numbers"), patterns.SPELLINGS, ids=[s.__name__ for s, _ in patterns.SPELLINGS])
def test_spellings_draw_the_same_token(spelling: Any, numbers: dict[str, float]) -> None:
    x, u = logits(500, 300).double(), kdk.random.uniform(1, 500).double()
    token, _ = kdk.ops.sample_top_k_top_p(x, **numbers, uniform=u)
    assert torch.equal(spelling(x, u, **numbers), token) and len(token.unique()) > 50


def test_warpers_of_transformers_keep_the_same_tokens() -> None:
    from transformers.generation import logits_process as t

    x, numbers = logits(200, 500).double(), {"k": 40, "p": 0.8, "min_p": 0.1, "temperature": 1.3}
    warpers = (t.TemperatureLogitsWarper(1.3), t.TopKLogitsWarper(40), t.TopPLogitsWarper(0.8), t.MinPLogitsWarper(0.1))
    scores = x
    for warper in warpers:
        scores = warper(None, scores)
    filters = {name: torch.full((200,), value) for name, value in numbers.items()}
    _, _, kept, _ = distribution(x, **filters)
    assert torch.equal(kept > 0, scores > -torch.inf)


# ---- edges ------------------------------------------------------------------------------------------------------------

INF, NAN, ALMOST = math.inf, math.nan, 1 - 2.0**-24
EDGES = [
    # logits, uniform, k, p, min_p, temperature -> token, probability
    ([0.0, 2.0, 1.0], 0.5, 0, 1.0, 0.0, 0.0, 1, 1.0),  # greedy
    ([3.0, 1.0, 3.0], ALMOST, 0, 1.0, 0.0, 0.0, 0, 0.5),  # greedy among equals: the first
    ([0.0, 2.0, 1.0], ALMOST, 1, 1.0, 0.0, 1.0, 1, 1.0),  # k = 1
    ([0.0, 2.0, 1.0], ALMOST, 0, 0.0, 0.0, 1.0, 1, 1.0),  # p = 0
    ([0.0, 2.0, 1.0], ALMOST, 0, 1e-30, 0.0, 1.0, 1, 1.0),
    ([0.0, 2.0, 1.0], ALMOST, 0, 1.0, 1.0, 1.0, 1, 1.0),  # min_p = 1
    ([1.0, 1.0, 1.0], 0.0, 1, 0.1, 1.0, 1.0, 0, 1 / 3),  # all equal: all stay
    ([1.0, 1.0, 1.0], 0.5, 1, 0.1, 1.0, 1.0, 1, 1 / 3),
    ([1.0, 1.0, 1.0], ALMOST, 2, 0.5, 0.5, 0.0, 0, 1 / 3),
    ([2.0, 0.0, 0.0], ALMOST, 2, 1.0, 0.0, 1.0, 2, 1 / (2 + math.exp(2))),  # equals of the k-th stay
    ([0.0, -0.0, -1.0], 0.9, 1, 1.0, 0.0, 1.0, 1, 0.5),  # both zeros are equal
    ([-INF, 0.0, -INF], ALMOST, 0, 1.0, 0.0, 1.0, 1, 1.0),  # one finite
    ([-INF, 0.0, -INF], 0.0, 3, 0.9, 0.1, 1.0, 1, 1.0),
    ([0.0, 0.0, -INF], ALMOST, 3, 1.0, 0.0, 1.0, 1, 0.5),  # k = V; nothing is drawn that weighs nothing
    ([0.0, 0.0, 0.0], ALMOST, 4, 1.0, 0.0, 1.0, 2, 1 / 3),  # k past V
    ([0.0, 0.0, 0.0], ALMOST, -1, 1.5, 0.0, 1.0, 2, 1 / 3),  # no filter
    ([0.0, -200.0, 0.0], 0.5, 0, 1.0, 0.0, 1.0, 2, 0.5),
    ([1e38, -1e38, 1e38], 0.7, 2, 0.9, 0.0, 2.0, 2, 0.5),
    ([-INF, -INF, -INF], 0.5, 2, 0.5, 0.1, 1.0, -1, NAN),
    ([0.0, NAN, 1.0], 0.5, 2, 0.5, 0.1, 1.0, -1, NAN),
    ([0.0, INF, 1.0], 0.5, 2, 0.5, 0.1, 0.0, -1, NAN),
    ([0.0, INF, INF], 0.5, 0, 1.0, 0.0, 1.0, -1, NAN),
]


@EVERY
def test_edges(implementation: str) -> None:
    rows, u, k, p, min_p, temperature, tokens, probabilities = zip(*EDGES)
    numbers = [torch.tensor(x) for x in (rows, u)] + [torch.tensor(k, dtype=torch.int32)]
    numbers += [torch.tensor(x) for x in (p, min_p, temperature)]
    token, logprob = kdk_ops(implementation, *numbers)
    assert token.tolist() == list(tokens)
    torch.testing.assert_close(logprob, torch.tensor(probabilities).log(), rtol=1e-6, atol=1e-6, equal_nan=True)


def kdk_ops(implementation: str, x: Tensor, u: Tensor, *filters: Any) -> tuple[Tensor, Tensor]:
    with kdk.use(implementation), kdk.strict():
        return kdk.ops.sample_top_k_top_p(x, *filters, uniform=u)


def test_numbers_are_the_same_in_every_row() -> None:
    x, u = logits(20, 50), kdk.random.uniform(3, 20)
    every = [torch.full((20,), value) for value in (7, 0.8, 0.05, 0.6)]
    expected = kdk.ops.sample_top_k_top_p(x, *every, uniform=u)
    for got, wanted in zip(kdk.ops.sample_top_k_top_p(x, 7, 0.8, 0.05, 0.6, uniform=u), expected):
        assert torch.equal(got, wanted)
    plain = kdk.ops.sample_top_k_top_p(x, uniform=u)
    for got, wanted in zip(kdk.ops.sample_top_k_top_p(x, 0, 1.0, 0.0, 1.0, uniform=u), plain):
        assert torch.equal(got, wanted)


FAR: list[dict[str, Any]] = [{"temperature": math.inf}, {"temperature": 1e31}, {"temperature": None}, {"k": "a"}]


@pytest.mark.parametrize("wrong", [{"p": -0.1}, {"p": 1.1}, {"p": NAN}, {"min_p": 2.0}, {"temperature": -1.0}, {"temperature": NAN}, *FAR])
def test_numbers_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="SAMPLE-NUMBER"):
        kdk.ops.sample_top_k_top_p(logits(2, 3), **wrong, uniform=torch.zeros(2))


# ---- the distribution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [{}, {"k": 5}, {"p": 0.8}, {"min_p": 0.1}, {"k": 6, "p": 0.9, "min_p": 0.02, "temperature": 1.5}])
def test_chi_square(numbers: dict[str, float]) -> None:
    """40,000 draws from 8 tokens: the statistic is below the 0.999 quantile for 7 degrees of freedom, 24.32, or fewer."""
    N, x = 40_000, logits(1, 8)
    token, logprob = kdk.ops.sample_top_k_top_p(x.expand(N, 8), **numbers, uniform=kdk.random.uniform(2026, N))
    filters = {name: torch.tensor([numbers[name]]) if name in numbers else None for name in ("k", "p", "min_p", "temperature")}
    _, _, kept, _ = distribution(x.double(), **filters)
    probability = (kept / kept.sum()).squeeze(0)
    counts = torch.bincount(token.long(), minlength=8)
    assert torch.equal(counts > 0, probability > 0)
    there = probability > 0
    statistic = ((counts - N * probability)[there].square() / (N * probability[there])).sum()
    assert statistic < 24.32
    torch.testing.assert_close(logprob.double(), probability[token.long()].log(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V", [1, 129, 2500])
def test_torch_draws_like_the_reference(dtype: torch.dtype, V: int) -> None:
    N, generator = 1500, torch.Generator().manual_seed(V)
    x = logits(N, V, scale=3.0).to(dtype)
    u, p, min_p, temperature = (torch.rand(N, generator=generator) for _ in range(4))
    args = (x, u, torch.randint(0, V, (N,), generator=generator, dtype=torch.int32), p, min_p / 5, 2 * temperature)
    for cut in (args, args[:3], (x, u, None, p)):
        expected, got = sample("reference", *cut), sample("torch", *cut)
        assert bool(valid(in_float64(*cut), {"token": got[0]}, TOLERANCE).all())
        same = expected[0] == got[0]
        assert int((~same).sum()) <= 2  # where rounding decides
        torch.testing.assert_close(got[1][same], expected[1][same], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["torch", *KERNELS])
@pytest.mark.parametrize("V", [262144, 151936, 100003])
def test_the_support_of_large_vocabularies(implementation: str, V: int) -> None:
    """logprob holds the sum of all that is kept: a token too many or too few shows."""
    N = 12  # past what the fault finder of Pallas looks at
    x = logits(N, V, scale=3.0)
    u, k = kdk.random.uniform(V, N), torch.arange(1, N + 1, dtype=torch.int32) * 20
    p = torch.linspace(0.05, 0.6, N)
    for args in ((x, u, k), (x, u, None, p), (x, u, k, p)):
        token, logprob = sample(implementation, *args)
        wide = in_float64(*args)
        assert bool(valid(wide, {"token": token}, TOLERANCE).all())
        expected = given(wide, {"token": token})[0]
        _, _, kept, _ = distribution(**{name: a for name, a in wide.items() if name != "uniform"})
        smallest = (kept.where(kept > 0, torch.inf).amin(-1) / kept.sum(-1)).min()
        error = (logprob - expected).abs().max()
        assert error < smallest / 2, (float(error), float(smallest))


# ---- the judge --------------------------------------------------------------------------------------------------------


def test_the_judge_refuses_wrong_tokens() -> None:
    N, V = 400, 200
    x, u = logits(N, V), kdk.random.uniform(5, N)
    k, p = torch.full((N,), 30, dtype=torch.int32), torch.full((N,), 0.9)
    args = in_float64(x, u, k, p)
    token, _ = sample("reference", x, u, k, p)
    assert bool(valid(args, {"token": token}, 1e-5).all())
    others = {"the next": (token + 1) % V, "none": torch.full_like(token, -1), "past the end": torch.full_like(token, V)}
    others["without top-k"], _ = sample("reference", x, u, None, p)
    others["without top-p"], _ = sample("reference", x, u, k, None)
    others["other numbers"], _ = sample("reference", x, u.roll(1), k, p)
    for name, other in others.items():
        differ = other != token
        wrong = ~valid(args, {"token": other}, 1e-5)
        assert int(differ.sum()) > 20, name
        assert int((wrong & differ).sum()) == int(differ.sum()), name


# ---- random numbers ---------------------------------------------------------------------------------------------------

VECTORS = [  # counter, key, result: tests/kat_vectors of Random123
    ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, (0xFFFFFFFF,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_philox_passes_the_published_vectors(counter: list[int], key: tuple[int, int], result: list[int]) -> None:
    words = kdk.random.philox(tuple(torch.tensor([word]) for word in counter), key)
    assert [int(word) for word in words] == result


def test_uniform() -> None:
    u = kdk.random.uniform(2**63 + 5, 100_000)
    assert u.dtype == torch.float32 and bool(((u >= 0) & (u < 1)).all())
    assert torch.equal(kdk.random.uniform(2**63 + 5, 7), u[:7])
    assert abs(u.mean() - 0.5) < 0.003 and abs(u.var() - 1 / 12) < 0.001
    assert not torch.equal(kdk.random.uniform(2**63 + 6, 7), u[:7])
    assert kdk.random.uniform(0, 0).shape == (0,)
    # 0x6627E8D5, the first word of the first vector: its upper 24 bits
    assert kdk.random.uniform(0, 1).item() == 0x6627E8 * 2.0**-24


def test_uniform_in_a_graph() -> None:
    """Inductor does not come to an end on Philox's rounds."""
    compiled = torch.compile(lambda seed, rows: kdk.random.uniform(seed, rows), fullgraph=True)
    assert torch.equal(compiled(2**63 + 5, 9), kdk.random.uniform(2**63 + 5, 9))


@pytest.mark.parametrize(("seed", "rows"), [(-1, 1), (2**64, 1), (0, -1), (0, 2**32), (1.5, 3), (1, None)])
def test_uniform_out_of_range(seed: int, rows: int) -> None:
    with pytest.raises(InputError, match="RANDOM-"):
        kdk.random.uniform(seed, rows)
