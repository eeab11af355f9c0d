"""What torch asks of every operator, from its declaration alone."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.inputs import arguments, cases, floating, results, total
from tests.judging import Right
from torch import Tensor
from torch.autograd import forward_ad

import kdk.ops
from kdk.errors import GradientError
from kdk.op import Op
from kdk.torch_library import Operator


def gradients(operator: Operator, values: dict[str, Any], **kwargs: Any) -> dict[str, Tensor]:
    """The gradient of every input that requires one."""
    names = [n for n in operator.op.uses if values[n].requires_grad]
    found = torch.autograd.grad(total(operator.call(**values)), [values[n] for n in names], **kwargs)
    return dict(zip(names, found))


def backward_arguments(op: Op, values: dict[str, Any], needs: str) -> list[Any]:
    """What the operator's backward gets: a gradient per output, what it reads by name, `needs`."""
    everything = results(op.reference(**values))
    have = {**values, **dict(zip((*op.outputs, *op.saved), everything))}
    parameters = list(backward_names(op))
    grads = [torch.ones_like(t) if t.is_floating_point() else None for t in everything[: len(op.outputs)]]
    return [*grads, *(have[name] for name in parameters[len(op.outputs) : -1]), needs]


def backward_names(op: Op) -> list[str]:
    assert op.backward is not None
    code = op.backward.__code__
    return list(code.co_varnames[: code.co_argcount])


def test_opcheck_forward(operator: Operator) -> None:
    values = arguments(operator.op, grad=True)
    torch.library.opcheck(operator.forward, tuple(values.values()))


def test_opcheck_backward(differentiable: Operator) -> None:
    op = differentiable.op
    for needs in {",".join(op.uses), *op.uses}:
        args = backward_arguments(op, arguments(op), needs)
        torch.library.opcheck(differentiable.backward, tuple(args), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", dir(kdk.ops))
def test_a_function_is_pickled_by_its_name(name: str) -> None:
    function = getattr(kdk.ops, name)
    assert function.__module__ == "kdk.ops" and pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize("inference", [False, True])
def test_outputs_are_contiguous_and_new(operator: Operator, inference: bool) -> None:
    with torch.inference_mode(inference):
        outputs_are_contiguous_and_new(operator, arguments(operator.op))


@pytest.mark.parametrize("inference", [False, True])
def test_a_result_that_would_be_its_input(inference: bool) -> None:
    with torch.inference_mode(inference):
        x = torch.randn(3, 4)
        y = torch.ops.kdk.add_bias(x)
    assert torch.equal(x, y) and y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def outputs_are_contiguous_and_new(operator: Operator, values: dict[str, Any]) -> None:
    kept = {name: v.clone() for name, v in values.items() if isinstance(v, Tensor)}
    outputs = results(operator.forward(**values))
    mine = {v.untyped_storage().data_ptr() for v in values.values() if isinstance(v, Tensor)}
    assert all(t.is_contiguous() for t in outputs)
    assert all(t.untyped_storage().data_ptr() not in mine for t in outputs)
    assert len({t.untyped_storage().data_ptr() for t in outputs}) == len(outputs)
    for name, value in kept.items():
        assert torch.equal(values[name], value)


def test_gradcheck(differentiable: Operator) -> None:
    op = differentiable.op
    values = arguments(op, torch.float64, grad=True)

    def function(*inputs: Tensor) -> list[Tensor]:
        return floating(differentiable.call(**{**values, **dict(zip(op.uses, inputs))}))

    assert torch.autograd.gradcheck(function, [values[n] for n in op.uses], fast_mode=True)


def test_backward_is_the_gradient_of_the_reference(differentiable: Operator) -> None:
    """Also where only one gradient is needed: the others are not computed."""
    op = differentiable.op
    values = arguments(op, torch.float64, grad=True)
    with kdk.use("reference"):
        expected = gradients(differentiable, values)
    for names in (tuple(op.uses), *((n,) for n in op.uses)):
        found = gradients(differentiable, arguments(op, torch.float64, grad=names))
        assert set(found) == set(names)
        for name in names:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-10)


def test_unneeded_gradients_are_neither_computed_nor_stored(differentiable: Operator) -> None:
    op = differentiable.op
    seen: list[str] = []
    for name in op.uses:
        output = floating(differentiable.call(**arguments(op, grad=(name,))))[-1 if name == list(op.uses)[-1] else 0]
        node = output.grad_fn
        assert node is not None
        reads = backward_names(op)[len(op.outputs) : -1]
        stored = [read for read, t in zip(reads, node.saved_tensors) if t is not None]
        assert set(stored) <= set(op.uses[name])
        with Needs(seen):
            total(output).backward()
    assert seen == list(op.uses)


def test_saved_tensors_have_no_gradient(differentiable: Operator) -> None:
    """They are results of the torch operator: a gradient through one would be dropped."""
    op = differentiable.op
    everything = results(differentiable.forward(**arguments(op, grad=True)))
    assert len(everything) == len(op.outputs) + len(op.saved)
    assert not any(t.requires_grad for t in everything[len(op.outputs) :])


class Needs(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the `needs` of every backward operator that runs."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "kdk" and func._opname.endswith("_backward"):
            self.seen.append(args[-1])
        return func(*args, **(kwargs or {}))


def test_no_input_requires_a_gradient(operator: Operator) -> None:
    for t in results(operator.call(**arguments(operator.op))):
        assert t.grad_fn is None


def test_backward_twice(differentiable: Operator) -> None:
    values = arguments(differentiable.op, grad=True)
    loss, inputs = total(differentiable.call(**values)), [values[n] for n in differentiable.op.uses]
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, inputs)):
        assert torch.equal(a, b)


def test_backward_in_another_thread(differentiable: Operator) -> None:
    values = arguments(differentiable.op, grad=True)
    loss = total(differentiable.call(**values))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    expected = gradients(differentiable, values)
    for name in differentiable.op.uses:
        assert torch.equal(values[name].grad, expected[name])


def test_second_derivative_raises_and_names_the_way_out(differentiable: Operator) -> None:
    name = differentiable.op.name
    values = arguments(differentiable.op, torch.float64, grad=True)
    loss = total(differentiable.call(**values)).square()  # the square: a linear operator's gradients depend on it too
    first = torch.autograd.grad(loss, [values[n] for n in differentiable.op.uses], create_graph=True)  # alone this is fine
    with pytest.raises(GradientError, match=f"use\\({name}='reference'\\)"):
        torch.stack([g.square().sum() for g in first]).sum().backward()


def test_second_derivative_under_the_reference(differentiable: Operator) -> None:
    op = differentiable.op
    values = arguments(op, torch.float64, grad=True)

    def function(*inputs: Tensor) -> list[Tensor]:
        with kdk.use("reference"):
            return floating(differentiable.call(**{**values, **dict(zip(op.uses, inputs))}))

    assert torch.autograd.gradgradcheck(function, [values[n] for n in op.uses], fast_mode=True)


def test_without_a_backward_a_gradient_is_refused() -> None:
    operator = kdk.registry.OPERATORS["positions"]
    order, largest = operator.call(torch.randn(3, 4, requires_grad=True))
    assert not order.requires_grad and not largest.requires_grad


def test_one_output_without_a_gradient() -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(3, requires_grad=True)
    left, right = kdk.ops.scale_both(a, b, 3.0)
    left.sum().backward(retain_graph=True)
    assert torch.equal(a.grad, torch.full_like(a, 3.0)) and b.grad is None
    right.sum().backward()
    assert torch.equal(b.grad, torch.full_like(b, 3.0))


def test_torch_func_grad(differentiable: Operator) -> None:
    op = differentiable.op
    values = arguments(op, torch.float64)
    expected = gradients(differentiable, arguments(op, torch.float64, grad=True))

    def function(inputs: dict[str, Tensor]) -> Tensor:
        return total(differentiable.call(**{**values, **inputs}))

    with kdk.record() as r:
        found = torch.func.grad(function)({n: values[n] for n in op.uses})
    assert [(row.how, row.reason) for row in r.rows] == [("inlined", "torch.func transform")]
    for name in op.uses:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-10)


def test_torch_func_vmap(operator: Operator) -> None:
    op = operator.op
    batches = [arguments(op, seed=seed) for seed in range(3)]
    stacked = {n: torch.stack([b[n] for b in batches]) for n in op.tensors}

    def function(tensors: dict[str, Tensor]) -> Any:
        return operator.call(**{**batches[0], **tensors})

    found = results(torch.func.vmap(function)(stacked))
    for i, batch in enumerate(batches):
        for a, b in zip(found, results(operator.call(**batch))):
            torch.testing.assert_close(a[i], b)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode(differentiable: Operator, requires_grad: bool) -> None:
    """Dual numbers go through the reference; the operator itself refuses them and does not drop the tangents."""
    op = differentiable.op
    values = arguments(op, torch.float64, grad=requires_grad)
    tangents = {n: torch.randn_like(values[n]) for n in op.uses}
    with forward_ad.dual_level():
        duals = {**values, **{n: forward_ad.make_dual(values[n], tangents[n]) for n in op.uses}}
        outputs = floating(differentiable.call(**duals))
        found = [forward_ad.unpack_dual(t).tangent for t in outputs]
        with pytest.raises(NotImplementedError, match="jvp"):
            differentiable.forward(**duals)

    def function(*inputs: Tensor) -> list[Tensor]:
        with kdk.use("reference"):
            return floating(differentiable.call(**{**values, **dict(zip(op.uses, inputs))}))

    _, expected = torch.func.jvp(function, tuple(values[n] for n in op.uses), tuple(tangents.values()))
    torch.testing.assert_close(found, list(expected))


@pytest.mark.parametrize("chosen", [contextlib.nullcontext, lambda: kdk.use("reference")], ids=["operator", "inlined"])
def test_autocast_changes_nothing(operator: Operator, chosen: Callable[[], Any]) -> None:
    """Also where the body multiplies matrices."""
    values = arguments(operator.op, grad=operator.op.backward is not None)
    with chosen():
        plain = results(operator.call(**values))
    with chosen(), torch.autocast("cpu", dtype=torch.bfloat16):
        for a, b in zip(results(operator.call(**values)), plain):
            assert a.dtype == b.dtype and torch.equal(a, b)
            if a.requires_grad:
                total(a).backward(retain_graph=True)
    for name in operator.op.uses:
        assert values[name].grad.dtype == torch.float32


def test_inference_mode(operator: Operator) -> None:
    values = arguments(operator.op)
    plain = results(operator.call(**values))
    with torch.inference_mode():
        for a, b in zip(results(operator.call(**arguments(operator.op))), plain):
            assert a.is_inference() and a.is_contiguous() and torch.equal(a, b)
        for a, b in zip(results(operator.call(**values)), plain):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(operator: Operator, dtype: torch.dtype) -> None:
    """The outputs' dtypes are those of the reference: the working dtype, unless it says otherwise."""
    values = arguments(operator.op, dtype)
    expected = results(operator.op.reference(**values))
    assert [t.dtype for t in results(operator.call(**values))] == [t.dtype for t in expected][: len(operator.op.outputs)]
    if operator.op.uses and dtype not in [t.dtype for t in expected]:  # a loss in float32, of inputs of any dtype
        assert {t.dtype for t in expected} == {torch.promote_types(dtype, torch.float32)}


def test_mixed_dtypes(operator: Operator) -> None:
    op = operator.op
    values = arguments(op, torch.bfloat16, grad=True)
    for name, other in op.mixed.items():
        values[name] = values[name].detach().to(getattr(torch, other)).requires_grad_(name in op.uses)
    plain = arguments(op, torch.bfloat16)
    outputs = floating(operator.call(**values))
    assert [t.dtype for t in outputs] == [t.dtype for t in floating(operator.call(**plain))], "as without the other dtype"
    if op.uses:
        total([t.float() for t in outputs]).backward()
    for name in op.uses:
        assert values[name].grad.dtype == values[name].dtype


def test_empty_inputs(operator: Operator) -> None:
    """Every letter that may be 0, alone."""
    op = operator.op
    letters = [letter for letter, dim in cases(op).dims.items() if not dim.minimum and not dim.at_most]
    assert letters
    for letter in letters:
        values = arguments(op, grad=True, **{letter: 0})
        found = results(operator.call(**values))
        found_gradients = gradients(operator, values) if op.uses else {}
        with kdk.use("reference"):
            wanted = results(operator.call(**values))
            wanted_gradients = gradients(operator, values) if op.uses else {}
        for a, b in zip(found, wanted):
            assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        for name, gradient in found_gradients.items():
            assert gradient.shape == values[name].shape
            torch.testing.assert_close(gradient, wanted_gradients[name])


def test_strided_inputs(operator: Operator) -> None:
    """Transposed views as inputs, an expanded (stride 0) gradient. Not equal bits: a product of matrices sums in an order of its own."""
    op = operator.op
    values, views = arguments(op, grad=True), arguments(op)
    for name in op.tensors:
        t = views[name]
        wide = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1]) if t.dim() else t
        wide[..., ::2] = t
        views[name] = (wide[..., ::2] if t.dim() < 2 else t.mT.contiguous().mT).requires_grad_(name in op.uses)
        assert not views[name].is_contiguous() or 1 in t.shape
    outputs = results(operator.call(**views))
    Right(op, values, outputs).check()
    assert all(a.is_contiguous() for a in outputs)
    if op.backward is not None:
        for v in (values, views):
            sum(t.sum() for t in floating(operator.call(**v))).backward()
        for name in op.uses:
            torch.testing.assert_close(views[name].grad, values[name].grad)


def test_the_documentation_is_the_reference(operator: Operator) -> None:
    assert operator.call.__doc__ == operator.op.reference.__doc__
    assert operator.call.__name__ == operator.op.name
    assert operator.op.summary
