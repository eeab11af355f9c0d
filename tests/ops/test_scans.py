"""linear_recurrence, cumsum, logcumsumexp: what is particular to scans. The checks that hold for every operator run elsewhere."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kdk
import kdk.ops
from kdk.errors import InputError
from kdk_kernels.cumsum import patterns as cumsum_patterns
from kdk_kernels.linear_recurrence import patterns as recurrence_patterns
from kdk_kernels.linear_recurrence.reference import STEPS, linear_recurrence, linear_recurrence_backward
from kdk_kernels.logcumsumexp import patterns as logcumsumexp_patterns
from kdk_kernels.logcumsumexp.reference import logcumsumexp, logcumsumexp_backward

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["triton", "pallas", "nki"])

# One step; one more than a tile; several tiles and segments, and a channel block that no tile divides; sequences side by side.
SHAPES = {"one step": (2, 1, 3), "65 steps": (1, 65, 130), "4097 steps": (1, 4097, 2), "one channel": (3, 33, 1)}


def _slow(implementation: str, name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Interpreting a Pallas kernel takes seconds for every new shape: all of them but one can wait."""
    return (pytest.mark.slow,) if implementation == "pallas" and name != "65 steps" else ()


KERNELS = pytest.mark.parametrize(
    ("implementation", "N", "T", "D"),
    [
        pytest.param(i, *sizes, id=f"{i} {name}", marks=_slow(i, name))
        for i in ("triton", "pallas", "nki")
        for name, sizes in SHAPES.items()
    ],
)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def decay(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Factors as models have them, most near 1."""
    return randn(*shape, seed=seed, dtype=torch.float64).add(2).sigmoid().to(dtype)


def loop(a: Tensor, b: Tensor, h0: Tensor | None = None, reverse: bool = False) -> Tensor:
    """The definition."""
    h = torch.zeros_like(b[..., 0, :]) if h0 is None else h0
    out = torch.empty_like(b)
    for t in reversed(range(b.shape[-2])) if reverse else range(b.shape[-2]):
        h = a[..., t, :] * h + b[..., t, :]
        out[..., t, :] = h
    return out


def by(implementation: str, function: Callable[..., Tensor], *args: Any, grad: Tensor) -> tuple[Tensor, ...]:
    """The result and the gradients of every tensor argument."""
    args = tuple([a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in args])
    with kdk.use(implementation), kdk.strict():
        out = function(*args)
    return (out.detach(), *torch.autograd.grad(out, [a for a in args if isinstance(a, Tensor)], grad))


def close(got: tuple[Tensor, ...], want: tuple[Tensor | None, ...], tolerance: float = 1e-6) -> None:
    """Within `tolerance` of the largest value of the result."""
    for g, w in zip(got, want, strict=True):
        assert w is not None and g.shape == w.shape and g.is_contiguous()
        torch.testing.assert_close(g.double(), w.double(), rtol=0.0, atol=tolerance * float(w.abs().max()))


def same_special(got: Tensor, want: Tensor) -> None:
    """Infinities and NaN where they belong, everything else near."""
    torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-6, equal_nan=True)


# ---- the references ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("T", [1, 65, STEPS, STEPS + 1, 4097])
def test_the_reference_is_the_definition(T: int, reverse: bool) -> None:
    a, b, h0 = (f(*s, seed=i, dtype=torch.float64) for i, (f, s) in enumerate(((decay, (2, T, 3)), (randn, (2, T, 3)), (randn, (2, 3)))))
    for start in (None, h0):
        want = loop(a, b, start, reverse)
        close((linear_recurrence(a, b, start, reverse),), (want,), 1e-14)
        narrow = [None if t is None else t.float() for t in (a, b, start)]
        exact = loop(*(None if t is None else t.double() for t in narrow), reverse)  # type: ignore[arg-type]
        close((linear_recurrence(*narrow, reverse),), (exact,), 3e-7)  # type: ignore[arg-type]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("T", [1, STEPS + 5])
def test_the_backward_is_the_derivative(T: int, reverse: bool) -> None:
    a, b, h0 = decay(2, T, 3, dtype=torch.float64), randn(2, T, 3, dtype=torch.float64), randn(2, 3, seed=2, dtype=torch.float64)
    grad = randn(2, T, 3, seed=3, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (a, b, h0)]
    h = loop(*inputs, reverse)
    want = torch.autograd.grad(h, inputs, grad)
    with torch.no_grad():
        close(linear_recurrence_backward(grad, a, h, h0, reverse, "a,b,h0"), want, 1e-13)  # type: ignore[arg-type]
        da, db, dh0 = linear_recurrence_backward(grad, a, None, h0, reverse, "h0")
    assert da is None and db is None and dh0 is not None


def test_infinities_in_the_reference_beyond_a_part() -> None:
    """What its docstring says of products of factors that overflow or vanish."""
    a, b = torch.ones(1, 3 * STEPS, 4), torch.zeros(1, 3 * STEPS, 4)
    a[..., 0] = 4.0  # step by step: 0 for ever
    a[..., 1], b[:, 3, 1] = 0.5, math.inf  # infinite for ever
    b[:, 3, 2] = math.inf
    b[:, 3, 3] = math.nan
    h = linear_recurrence(a, b)
    same_special(h[:, :STEPS], loop(a, b)[:, :STEPS])
    assert torch.isnan(h[:, STEPS:, [0, 3]]).all() and torch.isposinf(h[:, STEPS:, 2]).all()
    assert torch.isposinf(h[:, STEPS : 2 * STEPS, 1]).all() and torch.isnan(h[:, 2 * STEPS :, 1]).all()


PATTERNS = (recurrence_patterns, cumsum_patterns, logcumsumexp_patterns)
SPELLINGS = [pytest.param(m, f, s, id=f"{m.__name__.split('.')[1]} {f.__name__}") for m in PATTERNS for f, s in m.SPELLINGS]


@pytest.mark.parametrize(("module", "spelling", "scalars"), SPELLINGS)
def test_spellings_equal_the_reference(module: Any, spelling: Any, scalars: dict[str, bool]) -> None:
    args = [randn(2, 21, 3, dtype=torch.float64)]
    if module is recurrence_patterns:
        args = [decay(2, 21, 3, dtype=torch.float64), *args, randn(2, 3, seed=2, dtype=torch.float64)]
    operator = getattr(kdk.ops, module.__name__.split(".")[1])
    torch.testing.assert_close(spelling(*args), operator(*args, **scalars), rtol=1e-12, atol=1e-12)


# ---- the kernels ------------------------------------------------------------------------------------------------------


@KERNELS
def test_linear_recurrence(implementation: str, N: int, T: int, D: int) -> None:
    """A start and time forwards, none and time backwards."""
    a, b, h0, grad = decay(N, T, D), randn(N, T, D, seed=1), randn(N, D, seed=2), randn(N, T, D, seed=3)
    for start, reverse in ((h0, False), (None, True)):
        got = by(implementation, kdk.ops.linear_recurrence, a, b, start, reverse, grad=grad)
        wide = [None if t is None else t.double() for t in (a, b, start)]
        h = linear_recurrence(*wide, reverse)  # type: ignore[arg-type]
        gradients = linear_recurrence_backward(grad.double(), wide[0], h, wide[2], reverse, "a,b,h0")  # type: ignore[arg-type]
        close(got, (h, *gradients[: len(got) - 1]), 2e-6)


@IMPLEMENTATIONS
def test_linear_recurrence_step_by_step(implementation: str) -> None:
    """Factors whose products overflow or vanish, next to states that are 0, infinite or NaN: no division, no product alone."""
    a, b = torch.ones(1, 200, 7), randn(1, 200, 7)
    a[..., 0] = 0.0
    a[..., 2], b[:, :150, 2] = 4.0, 0.0  # 4^150 times the state 0
    a[..., 3], b[:, 3, 3] = 1e-3, math.inf  # stays infinite, though a product of factors becomes 0
    a[..., 4] = -2.5  # grows until it overflows, with a sign that changes
    a[..., 5], b[:, 50, 5] = 0.5, math.nan
    a[:, 60, 6] = math.inf
    with kdk.use(implementation), kdk.strict():
        got = kdk.ops.linear_recurrence(a, b)
    same_special(got, loop(a, b))
    assert torch.isinf(got[..., 3]).any() and torch.isinf(got[..., 4]).any() and torch.isfinite(got[:, :140, 2]).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16, torch.bfloat16)])
def test_the_state_is_float32(implementation: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """A thousand small terms to a state that a 16-bit sum would not leave."""
    a, b, h0 = (
        torch.ones(1, 1000, 2, dtype=dtypes[0]),
        torch.full((1, 1000, 2), 2.0**-9, dtype=dtypes[1]),
        torch.ones(1, 2, dtype=dtypes[2]),
    )
    with kdk.use(implementation), kdk.strict():
        h = kdk.ops.linear_recurrence(a, b, h0)
    assert h.dtype == torch.bfloat16
    assert torch.equal(h[0, :, 0], (1 + torch.arange(1, 1001) * 2.0**-9).bfloat16())


@KERNELS
def test_cumsum(implementation: str, N: int, T: int, D: int) -> None:
    """Positive terms: what is lost on the way stays lost."""
    x, grad = randn(N, T, D).abs(), randn(N, T, D, seed=1).abs()
    want = x.double().cumsum(-2), grad.double().flip(-2).cumsum(-2).flip(-2)
    close(by(implementation, kdk.ops.cumsum, x, grad=grad), want, 2e-6)


@IMPLEMENTATIONS
def test_cumsum_of_infinities(implementation: str) -> None:
    x = randn(1, 40, 4)
    x[0, 5, 0], x[0, 9, 0], x[0, 20, 1], x[0, 7, 2] = math.inf, -math.inf, -math.inf, math.nan
    with kdk.use(implementation), kdk.strict():
        same_special(kdk.ops.cumsum(x), x.cumsum(-2))


@KERNELS
def test_logcumsumexp(implementation: str, N: int, T: int, D: int) -> None:
    x, grad = randn(N, T, D) * 5, randn(N, T, D, seed=1)
    got = by(implementation, kdk.ops.logcumsumexp, x, grad=grad)
    y = logcumsumexp(x.double())
    close(got, (y, logcumsumexp_backward(grad.double(), x.double(), y, "x")), 1e-5)


@IMPLEMENTATIONS
def test_logcumsumexp_of_infinities(implementation: str) -> None:
    """-inf adds nothing and gets no gradient; all -inf, up to a step or to the end; values that exp cannot hold."""
    x = randn(1, 40, 6)
    x[0, :, 0] = -math.inf
    x[0, :9, 1] = -math.inf
    x[0, 11:15, 2] = -math.inf
    x[0, :20, 3], x[0, 20:, 3] = -1e30, 1e30
    x[0, 13, 4] = math.inf
    x[0, 17, 5] = math.nan
    got, gradient = by(implementation, kdk.ops.logcumsumexp, x, grad=torch.ones_like(x))
    same_special(got, x.logcumsumexp(-2))
    same_special(gradient, logcumsumexp_backward(torch.ones_like(x), x, got, "x"))
    assert not gradient[torch.isneginf(x)].any() and torch.isfinite(gradient[..., :4]).all()


@pytest.mark.parametrize("layout", ["channels first", "expanded factors"])
def test_views_in_triton(layout: str) -> None:
    """Time in another place, and a factor that all channels share: no copy, and as contiguous."""
    a, b = decay(2, 33, 1).expand(2, 33, 20), randn(2, 33, 20)
    if layout == "channels first":
        a, b = decay(2, 20, 33).movedim(-1, -2), randn(2, 20, 33).movedim(-1, -2)
    with kdk.use("triton"), kdk.strict():
        got = kdk.ops.linear_recurrence(a, b)
    close((got,), (linear_recurrence(a.double(), b.double()),))


@pytest.mark.parametrize("operator", ["linear_recurrence", "cumsum", "logcumsumexp"])
def test_memory_is_linear(operator: str) -> None:
    """No array of a Pallas kernel's program is larger than the tensors (padding aside): nothing grows with the square of T."""
    pytest.importorskip("jax")
    import importlib

    from kdk.backends.pallas.launch import prepare

    prepare()
    import jax

    forward = importlib.import_module(f"kdk_kernels.{operator}.pallas").forward
    x = jax.ShapeDtypeStruct((1, 4096, 128), "float32")
    args = (x, x, None, False) if operator == "linear_recurrence" else (x,)
    program = jax.make_jaxpr(lambda *tensors: forward(*tensors, *args[len(tensors) :]))(*[a for a in args if a is x])
    assert max(v.aval.size for equation in program.eqns for v in equation.outvars) <= 4096 * 128


def test_errors() -> None:
    x = torch.randn(2, 5, 3)
    for args, what in (
        ((x[0, 0], x[0, 0]), "shape of b"),
        ((x[:, :4], x), "shape of a"),
        ((x, x, torch.zeros(2, 5)), "shape of h0"),
        ((x, x, x), "shape of h0"),
    ):
        with pytest.raises(InputError, match=what):
            kdk.ops.linear_recurrence(*args)
    for operator in (kdk.ops.cumsum, kdk.ops.logcumsumexp):
        with pytest.raises(InputError, match="time before channels"):
            operator(torch.zeros(3))


# ---- long ones --------------------------------------------------------------------------------------------------------


@IMPLEMENTATIONS
def test_small_terms_do_not_vanish_in_a_long_sum(implementation: str) -> None:
    """Thirds, added one by one to a sum of thousands, are all rounded the same way: 5e-5 of the logarithm after 8,193."""
    x = torch.full((1, 2**13 + 1, 1), math.log(1 / 3))
    x[0, 0] = 0.0
    with kdk.use(implementation), kdk.strict():
        torch.testing.assert_close(kdk.ops.logcumsumexp(x).double(), x.double().logcumsumexp(-2), rtol=0.0, atol=1e-5)



@pytest.mark.slow
@IMPLEMENTATIONS
def test_a_million_steps(implementation: str) -> None:
    T = 2**20 + 1
    x = randn(1, T, 1).abs()
    with kdk.use(implementation), kdk.strict():
        close((kdk.ops.cumsum(x),), (x.double().cumsum(-2),), 1e-5)
        close((kdk.ops.logcumsumexp(x),), (x.double().logcumsumexp(-2),), 1e-6)
    a, grad = decay(1, T, 1), randn(1, T, 1, seed=1)
    h = linear_recurrence(a.double(), x.double())
    da, db, _ = linear_recurrence_backward(grad.double(), a.double(), h, None, False, "a,b")
    close(by(implementation, kdk.ops.linear_recurrence, a, x, grad=grad), (h, da, db), 2e-6)
