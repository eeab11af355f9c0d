"""kdk.jax: values and gradients of every operator against its torch reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kdk.ops
from kdk.backends.pallas.launch import prepare
from kdk.errors import GradientError, InputError, RefusedError
from kdk.registry import OPERATORS

pytest.importorskip("jax", reason="the test is of kdk's functions for jax")
prepare()
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from tests.inputs import arguments, floating, results  # noqa: E402

import kdk.jax  # noqa: E402
from kdk.backends.pallas.compile import device  # noqa: E402
from kdk.backends.pallas.environment import on_chip  # noqa: E402
from kdk.backends.pallas.simulate import to_jax, to_torch  # noqa: E402
from kdk_bench.numerics import judge  # noqa: E402

NAMES = dir(kdk.jax)
DTYPES = [torch.float32, torch.bfloat16]


def close(got: Any, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """By the acceptance rule, with the reference for the oracle: it rounds once, or twice where autograd rounds in between."""
    found = to_torch(got)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    verdict = judge(found, expected, expected.detach().double(), longest=64)
    assert verdict.accepted, verdict.reason


def static(name: str) -> tuple[str, ...]:
    op = OPERATORS[name].op
    return tuple(n for n in op.arguments if n not in op.tensors)


def in_jax(values: dict[str, Any]) -> dict[str, Any]:
    return {n: to_jax(v) if isinstance(v, torch.Tensor) else v for n, v in values.items()}


def jax_total(value: Any) -> jax.Array:
    """tests.inputs.total in jax."""
    parts = []
    for t in value if isinstance(value, tuple) else (value,):
        if jnp.issubdtype(t.dtype, jnp.floating):
            weights = to_jax(torch.linspace(0.5, 1.5, t.size, dtype=getattr(torch, t.dtype.name)))
            parts.append((t.astype(jnp.float32) * weights.reshape(t.shape)).sum())
    return sum(parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_values(name: str, dtype: torch.dtype) -> None:
    values = arguments(OPERATORS[name].op, dtype)
    expected = results(OPERATORS[name].op.reference(**values))
    function = getattr(kdk.jax, name)
    got = jax.jit(function, static_argnames=static(name))(**in_jax(values))
    got = got if isinstance(got, tuple) else (got,)
    assert len(got) == len(OPERATORS[name].op.outputs), "saved tensors stay inside"
    for g, e in zip(got, expected):
        close(g, e, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    op = OPERATORS[name].op
    if op.backward is None:
        return
    values = arguments(op, dtype, grad=True)
    outputs = results(OPERATORS[name].call(**values))  # its declared backward reads what the forward stored, rounded
    weights = [torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).reshape(t.shape) for t in floating(outputs)]
    inputs = [values[n] for n in op.uses]
    expected = torch.autograd.grad(list(floating(outputs)), inputs, weights)

    def loss(chosen: dict[str, Any], others: dict[str, Any]) -> jax.Array:
        return jax_total(getattr(kdk.jax, name)(**chosen, **others))

    every = in_jax(values)
    others = {n: v for n, v in every.items() if n not in op.uses}
    got = jax.jit(jax.grad(lambda chosen: loss(chosen, others)))({n: every[n] for n in op.uses})
    for n, e in zip(op.uses, expected):
        close(got[n], e, dtype)
    for n, e in zip(op.uses, expected):  # one alone, without jit
        rest = {k: v for k, v in every.items() if k != n}
        alone = jax.grad(lambda x, n=n, rest=rest: loss({n: x}, rest))(every[n])
        close(alone, e, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_only_needed_gradients_are_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPERATORS[name].op
    every = in_jax(arguments(op))
    asked: list[str] = []
    run = kdk.jax._run

    def note(op: Any, direction: str, args: tuple[Any, ...]) -> Any:
        if direction == "backward":
            asked.append(args[-1])
        return run(op, direction, args)

    monkeypatch.setattr(kdk.jax, "_run", note)
    for needed in op.uses:
        rest = {k: v for k, v in every.items() if k != needed}
        jax.grad(lambda x, needed=needed, rest=rest: jax_total(getattr(kdk.jax, name)(**{needed: x}, **rest)))(every[needed])
    assert asked == list(op.uses)


@pytest.mark.parametrize("name", NAMES)
def test_compiles_for_a_tpu(name: str) -> None:
    """The program lowered for a chip holds the kernel, not its interpreter."""
    pytest.importorskip("libtpu", reason="libtpu is the compiler")
    chip = jax.sharding.SingleDeviceSharding(device("v6e"))
    values = in_jax(arguments(OPERATORS[name].op, torch.bfloat16))
    arrays = {n: v for n, v in values.items() if isinstance(v, jax.Array)}
    scalars = {n: v for n, v in values.items() if n not in arrays}
    specs = {n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=chip) for n, v in arrays.items()}
    with on_chip("v6e"):
        lowered = jax.jit(lambda given: getattr(kdk.jax, name)(**given, **scalars)).lower(specs)
    assert "tpu_custom_call" in lowered.compile().as_text()


def test_vmap_and_empty_arrays() -> None:
    values = in_jax(arguments(OPERATORS["rms_norm"].op))
    x, weight = values["x"], values["weight"]
    one_by_one = jax.vmap(lambda row: kdk.jax.rms_norm(row, weight, 1e-6))(x)
    assert jnp.allclose(one_by_one, kdk.jax.rms_norm(x, weight, 1e-6), rtol=1e-6)
    empty = x[:0]
    assert kdk.jax.rms_norm(empty, weight, 1e-6).shape == empty.shape
    grads = jax.grad(lambda x, w: kdk.jax.rms_norm(x, w, 1e-6).sum(), argnums=(0, 1))(empty, weight)
    assert grads[0].shape == empty.shape and (grads[1] == 0).all()


def test_the_declaration_checks_the_arguments() -> None:
    x, weight = jnp.ones((4, 8)), jnp.ones(8)
    with pytest.raises(InputError, match="RMS-WEIGHT"):
        kdk.jax.rms_norm(x, jnp.ones(7), 1e-6)
    with pytest.raises(InputError, match="RMS-EPS"):
        jax.jit(kdk.jax.rms_norm, static_argnums=2)(x, weight, -1.0)
    with pytest.raises(InputError, match=r"KDK-JAX-DTYPE.*no float16"):
        kdk.jax.rms_norm(x.astype(jnp.float16), weight, 1e-6)
    with pytest.raises(InputError, match=r"KDK-JAX-STATIC.*eps is static.*static_argnames"):
        jax.jit(kdk.jax.rms_norm)(x, weight, 1e-6)
    with pytest.raises(InputError, match=r"KDK-JAX-ARGUMENT.*got Tensor"):
        kdk.jax.rms_norm(torch.ones(4, 8), weight, 1e-6)
    with pytest.raises(RefusedError, match="H = 200000"):
        kdk.jax.rms_norm(jnp.ones((1, 200_000)), jnp.ones(200_000), 1e-6)


def test_a_gradient_that_does_not_exist_raises() -> None:
    values = in_jax(arguments(OPERATORS["rope"].op))
    with pytest.raises(GradientError, match="rope has no gradient for 'cos'"):
        jax.grad(lambda cos: jax_total(kdk.jax.rope(**{**values, "cos": cos})))(values["cos"])


def test_an_operator_without_a_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError, match=r"has no operator 'nothing'; there are .*rms_norm"):
        kdk.jax.nothing  # noqa: B018
    monkeypatch.setattr(kdk.jax, "kernel_file", lambda op, language, direction: None if op.name == "rope" else "x")
    with pytest.raises(AttributeError, match="has no Pallas kernel for 'rope'"):
        kdk.jax.rope  # noqa: B018
    monkeypatch.undo()
    assert "rope" in dir(kdk.jax)


def test_without_a_backward_kernel_gradients_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kdk.jax.kernel_file
    monkeypatch.setattr(kdk.jax, "kernel_file", lambda op, lang, d: None if d == "backward" else real(op, lang, d))
    with pytest.raises(GradientError, match="silu_and_mul has no Pallas kernel for its backward"):
        jax.grad(lambda x: kdk.jax.silu_and_mul(x, x).sum())(jnp.ones((4, 8)))
