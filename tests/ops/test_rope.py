"""rope: what is particular to it. The checks that hold for every operator run elsewhere."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import kdk
import kdk.ops
from kdk.errors import GradientError, InputError, RefusedError
from kdk_kernels.rope import patterns
from kdk_kernels.rope.reference import rope, rope_backward

KERNELS = ("triton", "pallas", "nki")
PAIRINGS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", KERNELS)

# B, S, Hq, Hk, D, R: the widths of real heads, and sizes that no tile divides.
SHAPES = [
    pytest.param(1, 3, 8, 2, 128, 128, id="llama"),
    pytest.param(2, 3, 4, 4, 80, 32, id="phi"),
    pytest.param(1, 2, 3, 3, 256, 64, id="gpt-j"),
    pytest.param(2, 37, 3, 1, 20, 10, id="odd"),
    pytest.param(9, 1, 4, 1, 64, 64, id="decode"),
    pytest.param(2, 3, 5, 4, 6, 6, id="short heads"),
    pytest.param(1, 131, 1, 1, 6, 2, id="one pair"),
]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def angles(tokens: int, rotary: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """cos and sin (1, S, R) in float64 as models make them: both members of a pair have the same angle."""
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * 10000.0 ** -(torch.arange(0, rotary, 2) / rotary)
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    return angle.cos()[None], angle.sin()[None]


def forward(implementation: str, *args: Any) -> tuple[Tensor, Tensor]:
    with kdk.use(implementation), kdk.strict():
        return kdk.ops.rope(*args)


def both(implementation: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, grads: list[Tensor]) -> tuple[Tensor, ...]:
    """q_out, k_out and the gradients of q and k."""
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    outputs = forward(implementation, q, k, cos, sin, interleaved)
    return (*(out.detach() for out in outputs), *torch.autograd.grad(outputs, (q, k), grads))


def close(got: tuple[Tensor, ...], want: tuple[Tensor | None, ...]) -> None:
    for g, w in zip(got, want, strict=True):
        assert w is not None and g.is_contiguous()
        torch.testing.assert_close(g.double(), w.double(), rtol=4e-6, atol=2e-6)


def loop(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The definition, one pair after the other."""
    out, half = x.clone(), cos.shape[-1] // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        ca, cb, sa, sb = (t.unsqueeze(-1) for t in (cos[..., a], cos[..., b], sin[..., a], sin[..., b]))
        out[..., a] = x[..., a] * ca - x[..., b] * sa
        out[..., b] = x[..., b] * cb + x[..., a] * sb
    return out


@PAIRINGS
def test_reference_is_the_definition(interleaved: bool) -> None:
    q, k = randn(2, 3, 4, 10, dtype=torch.float64), randn(2, 3, 2, 10, seed=1, dtype=torch.float64)
    cos, sin = randn(2, 3, 6, seed=2, dtype=torch.float64), randn(2, 3, 6, seed=3, dtype=torch.float64)
    for got, x in zip(rope(q, k, cos, sin, interleaved), (q, k)):
        torch.testing.assert_close(got, loop(x, cos, sin, interleaved), rtol=0.0, atol=1e-14)


@pytest.mark.parametrize(("spelling", "scalars"), patterns.SPELLINGS, ids=[s.__name__ for s, _ in patterns.SPELLINGS])
def test_spellings_equal_the_reference(spelling: Any, scalars: dict[str, bool]) -> None:
    dim, rotary = (24, 16) if spelling in (patterns.partial, patterns.every_two) else (16, 16)
    q, k = randn(2, 5, 4, dim, dtype=torch.float64), randn(2, 5, 2, dim, seed=1, dtype=torch.float64)
    cos, sin = angles(5, rotary, scalars["interleaved"])
    for got, want in zip(spelling(q, k, cos, sin), rope(q, k, cos, sin, **scalars)):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)


@PAIRINGS
def test_backward_is_the_derivative(interleaved: bool) -> None:
    q = randn(2, 3, 4, 10, dtype=torch.float64).requires_grad_()
    k = randn(2, 3, 2, 10, seed=1, dtype=torch.float64).requires_grad_()
    cos, sin = randn(1, 3, 6, seed=2, dtype=torch.float64), randn(1, 3, 6, seed=3, dtype=torch.float64)
    outputs = rope(q, k, cos, sin, interleaved)
    grads = [torch.randn_like(out) for out in outputs]
    want = torch.autograd.grad(outputs, (q, k), grads)
    for g, w in zip(rope_backward(grads[0], grads[1], cos, sin, interleaved, "q,k"), want):
        torch.testing.assert_close(g, w, rtol=1e-13, atol=1e-14)


@IMPLEMENTATIONS
@PAIRINGS
@pytest.mark.parametrize(("B", "S", "Hq", "Hk", "D", "R"), SHAPES)
def test_kernels(implementation: str, interleaved: bool, B: int, S: int, Hq: int, Hk: int, D: int, R: int) -> None:
    """Tables whose halves differ, and one table for all sequences as well as one for each."""
    q, k = randn(B, S, Hq, D), randn(B, S, Hk, D, seed=1)
    grads = [randn(B, S, Hq, D, seed=2), randn(B, S, Hk, D, seed=3)]
    cos, sin = randn(B, S, R, seed=4), randn(B, S, R, seed=5)
    wide = [t.double() for t in (cos, sin)]
    want = rope(q.double(), k.double(), *wide, interleaved)
    wanted = rope_backward(grads[0].double(), grads[1].double(), *wide, interleaved, "q,k")
    close(both(implementation, q, k, cos, sin, interleaved, grads), (*want, *wanted))
    if B > 1:
        want = rope(q.double(), k.double(), wide[0][:1], wide[1][:1], interleaved)
        close(forward(implementation, q, k, cos[:1], sin[:1], interleaved), want)


@IMPLEMENTATIONS
@PAIRINGS
def test_without_a_batch(implementation: str, interleaved: bool) -> None:
    q, k, cos, sin = randn(5, 4, 16), randn(5, 2, 16, seed=1), randn(5, 8, seed=2), randn(5, 8, seed=3)
    grads = [randn(5, 4, 16, seed=4), randn(5, 2, 16, seed=5)]
    want = rope(q.double(), k.double(), cos.double(), sin.double(), interleaved)
    wanted = rope_backward(grads[0].double(), grads[1].double(), cos.double(), sin.double(), interleaved, "q,k")
    close(both(implementation, q, k, cos, sin, interleaved, grads), (*want, *wanted))


@IMPLEMENTATIONS
@PAIRINGS
def test_the_rest_passes_through_unchanged(implementation: str, interleaved: bool) -> None:
    """Infinities and NaN past R stay where they are; those before R do not reach them."""
    q = randn(1, 3, 2, 12, dtype=torch.bfloat16)
    q[..., 8:] = torch.tensor([math.inf, math.nan, -0.0, -math.inf])
    q[0, 1, :, :8] = math.nan
    cos, sin = angles(3, 8, interleaved)
    out, _ = forward(implementation, q, q, cos.float(), sin.float(), interleaved)
    torch.testing.assert_close(out[..., 8:], q[..., 8:], rtol=0.0, atol=0.0, equal_nan=True)
    assert torch.signbit(out[..., 10]).all()
    assert torch.isfinite(out[0, ::2, :, :8]).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("layout", ["fused projection", "heads first", "elements first", "expanded"])
def test_views(implementation: str, layout: str) -> None:
    """Queries as models hand them over; they are not changed (unsloth#5001)."""
    if layout == "fused projection":
        q, k, _ = randn(2, 3, (4 + 2 + 2) * 16).view(2, 3, 8, 16).split([4, 2, 2], dim=2)
    elif layout == "heads first":
        q, k = randn(2, 4, 3, 16).transpose(1, 2), randn(2, 2, 3, 16, seed=1).transpose(1, 2)
    elif layout == "elements first":
        q, k = randn(2, 3, 16, 4).transpose(2, 3), randn(2, 3, 16, 2, seed=1).transpose(2, 3)
    else:
        q, k = randn(1, 3, 1, 16).expand(2, 3, 4, 16), randn(1, 1, 1, 1, seed=1).expand(2, 3, 2, 16)
    cos, sin = randn(1, 2 * 3, 32, seed=2)[:, ::2, 1::2], randn(1, 2 * 3, 32, seed=3)[:, ::2, 1::2]
    before = [t.clone() for t in (q, k, cos, sin)]
    want = rope(q.double(), k.double(), cos.double(), sin.double())
    close(forward(implementation, q, k, cos, sin), want)
    assert all(torch.equal(t, b) for t, b in zip((q, k, cos, sin), before))
    got = both(implementation, q.contiguous(), k.contiguous(), cos, sin, False, [q, k])
    close(got[2:], rope_backward(q.double(), k.double(), cos.double(), sin.double(), False, "q,k"))


@IMPLEMENTATIONS
def test_an_output_without_gradient_costs_and_gives_nothing(implementation: str) -> None:
    q, k = randn(1, 3, 2, 8).requires_grad_(), randn(1, 3, 1, 8, seed=1).requires_grad_()
    cos, sin = randn(1, 3, 8, seed=2), randn(1, 3, 8, seed=3)
    q_out, _ = forward(implementation, q, k, cos, sin)
    q_out.sum().backward()
    want, _ = rope_backward(torch.ones(1, 3, 2, 8), None, cos, sin, False, "q,k")
    assert k.grad is None and q.grad is not None
    close((q.grad,), (want,))


def test_only_keys_need_a_gradient() -> None:
    q, k = randn(1, 3, 2, 8), randn(1, 3, 1, 8, seed=1).requires_grad_()
    cos, sin = randn(1, 3, 8, seed=2), randn(1, 3, 8, seed=3)
    q_out, k_out = kdk.ops.rope(q, k, cos, sin)
    (q_out.sum() + k_out.sum()).backward()
    assert k.grad is not None
    torch.testing.assert_close(k.grad, rope_backward(None, torch.ones(1, 3, 1, 8), cos, sin, False, "k")[1])


def test_tables_that_need_a_gradient_take_the_reference() -> None:
    q, k = randn(2, 3, 2, 8), randn(2, 3, 1, 8, seed=1)
    cos, sin = randn(1, 3, 8, seed=2).requires_grad_(), randn(1, 3, 8, seed=3)
    with kdk.record() as ran:
        q_out, _ = kdk.ops.rope(q, k, cos, sin)
    assert ran.calls("rope") == 1
    (got,) = torch.autograd.grad(q_out.sum(), cos)
    torch.testing.assert_close(got, q.sum((0, 2))[None])


def test_second_derivative_is_refused_and_the_way_out_works() -> None:
    q, k = randn(1, 2, 1, 4, dtype=torch.float64).requires_grad_(), randn(1, 2, 1, 4, dtype=torch.float64)
    cos, sin = angles(2, 4, False)

    def second() -> Tensor:
        (first,) = torch.autograd.grad(kdk.ops.rope(q, k, cos, sin)[0].square().sum(), q, create_graph=True)
        return torch.autograd.grad(first.sum(), q)[0]

    with pytest.raises(GradientError, match=r"kdk\.use"):
        second()
    with kdk.use("reference"):
        torch.testing.assert_close(second(), torch.full_like(q, 2.0))


@IMPLEMENTATIONS
@PAIRINGS
def test_backward_undoes_a_rotation(implementation: str, interleaved: bool) -> None:
    """A rotation is orthogonal: its transpose is its inverse."""
    q, k = randn(1, 5, 2, 16), randn(1, 5, 1, 16, seed=1)
    cos, sin = (t.float() for t in angles(5, 16, interleaved))
    turned = rope(q, k, cos, sin, interleaved)
    close(both(implementation, q, k, cos, sin, interleaved, list(turned)), (*turned, q, k))


def test_triton_index_arithmetic_passes_2_to_31() -> None:
    """The second token's queries and the second head's keys start at element 2^31."""
    pytest.importorskip("triton")
    memory = torch.empty(2**31 + 64, dtype=torch.float16)  # untouched pages cost nothing
    q, k = memory.as_strided((1, 2, 1, 64), (0, 2**31, 64, 1)), memory.as_strided((1, 1, 2, 64), (0, 64, 2**31, 1))
    for far in (q, k):
        far.copy_(randn(*far.shape))
        same = far.contiguous()
        cos, sin = randn(1, far.shape[1], 64, seed=2), randn(1, far.shape[1], 64, seed=3)
        assert torch.equal(forward("triton", far, same, cos, sin)[0], forward("triton", same, same, cos, sin)[0])


def test_nki_queries_of_a_fused_projection_are_not_copied() -> None:
    from kdk.backends.nki import launch

    launch.prepare()
    from kdk_kernels.rope.nki import lines

    projected = randn(2, 3, 8, 16)
    q, k, _ = projected.split([4, 2, 2], dim=2)
    line, rows = lines(k)
    assert line.data_ptr() == k.data_ptr() == projected.data_ptr() + 4 * 16 * 4 and line.is_contiguous()
    assert rows == (6, 3 * 128, 128, 16)  # both sequences as one, for 128 tokens to share a tile
    assert lines(q.transpose(1, 2).contiguous().transpose(1, 2))[1] == (3, 4 * 3 * 16, 16, 3 * 16)
    assert lines(q[:, :1])[1][:1] == (2,)  # in decoding the sequences are the tokens


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("implementation", "heads", "dim", "reason"),
    [("pallas", 1025, 128, "up to 682 heads"), ("nki", 1, 8194, "up to D = 8192")],
)
def test_what_does_not_fit_is_refused(implementation: str, heads: int, dim: int, reason: str, direction: str) -> None:
    q, cos = randn(1, 1, heads, dim), randn(1, 1, 2)
    if direction == "forward":
        with pytest.raises(RefusedError, match=reason):
            forward(implementation, q, q[:, :, :1], cos, cos)
    else:
        with pytest.raises(RefusedError, match=reason), kdk.strict():
            torch.ops.kdk.rope_backward(q, None, cos, cos, False, "q", impl=f"{implementation}!")


@IMPLEMENTATIONS
def test_heads_that_fill_several_tiles(implementation: str) -> None:
    q, k, cos, sin = randn(1, 2, 70, 128), randn(1, 2, 3, 128, seed=1), randn(1, 2, 96, seed=2), randn(1, 2, 96, seed=3)
    close(forward(implementation, q, k, cos, sin), rope(q.double(), k.double(), cos.double(), sin.double()))


@pytest.mark.parametrize(
    ("q", "k", "table", "dtype", "code"),
    [
        ((2, 8), (2, 8), (2, 8), torch.float32, "ROPE-Q"),
        ((1, 3, 4, 8), (1, 2, 4, 8), (1, 3, 8), torch.float32, "ROPE-K"),
        ((1, 3, 4, 8), (3, 4, 8), (1, 3, 8), torch.float32, "ROPE-K"),
        ((1, 3, 4, 8), (1, 3, 2, 6), (1, 3, 6), torch.float32, "ROPE-K"),
        ((2, 3, 4, 8), (2, 3, 2, 8), (3, 8), torch.float32, "ROPE-TABLES"),
        ((3, 3, 4, 8), (3, 3, 2, 8), (2, 3, 8), torch.float32, "ROPE-TABLES"),
        ((1, 3, 4, 8), (1, 3, 2, 8), (1, 4, 8), torch.float32, "ROPE-TABLES"),
        ((1, 3, 4, 8), (1, 3, 2, 8), (1, 3, 8), torch.float16, "KDK-DTYPE"),
        ((1, 3, 4, 8), (1, 3, 2, 8), (1, 3, 10), torch.float32, "ROPE-R"),
        ((1, 3, 4, 8), (1, 3, 2, 8), (1, 3, 5), torch.float32, "ROPE-R"),
    ],
)
def test_refused(q: tuple[int, ...], k: tuple[int, ...], table: tuple[int, ...], dtype: torch.dtype, code: str) -> None:
    cos = randn(*table, dtype=dtype)
    with pytest.raises(InputError) as error:
        kdk.ops.rope(randn(*q), randn(*k), cos, cos)
    assert error.value.code == code


def test_refused_where_tables_or_keys_differ() -> None:
    q, cos = randn(1, 3, 4, 8), randn(1, 3, 8)
    for k, sin, code in ((q.half(), cos, "KDK-DTYPE"), (q, cos[..., :6], "ROPE-TABLES"), (q, cos.half(), "KDK-DTYPE")):
        with pytest.raises(InputError) as error:
            kdk.ops.rope(q, k, cos, sin)
        assert error.value.code == code
