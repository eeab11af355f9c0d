"""The check is checked: faults planted in a kernel's place fail for every operator, direction and in the quick tier's cases."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import kdk.ops  # noqa: F401  (registers the operators)
from kdk.dispatch import as_promised
from kdk.op import Op
from kdk.registry import OPERATORS
from kdk.rounding import storing
from kdk_bench.check import Row, run_row
from kdk_bench.declared_cases import cases_of
from kdk_bench.expectation import wider
from kdk_bench.numerics import same_bits
from kdk_bench.places import place

Kernel = Callable[..., tuple[Tensor | None, ...]]


def right(op: Op, direction: str, *args: Any) -> tuple[Tensor | None, ...]:
    """What a faultless kernel returns: the reference's results, in tensors of their own, in the promised memory format."""
    result = as_promised(op, op.function(direction))(*args)
    results = result if isinstance(result, tuple) else (result,)
    return tuple(None if t is None else t.clone(memory_format=torch.preserve_format) for t in results)


def each(change: Callable[[Tensor], Tensor]) -> Callable[[Op, str], Kernel]:
    """A fault that changes every right result."""

    def plant(op: Op, direction: str) -> Kernel:
        return lambda *args: tuple(None if t is None else change(t) for t in right(op, direction, *args))

    return plant


def skip_last_tile(t: Tensor) -> Tensor:
    t = t.clone()
    if t.dim():
        t[..., -max(1, t.shape[-1] // 4) :] = 0
    return t


def input_returned(op: Op, direction: str) -> Kernel:
    def kernel(*args: Any) -> tuple[Tensor | None, ...]:
        results = right(op, direction, *args)
        inputs = [a for a in args if isinstance(a, Tensor)]
        swap = [next((a for a in inputs if t is not None and a.shape == t.shape), None) for t in results]
        return tuple(t if a is None or t is None else a.to(t.dtype).contiguous() for t, a in zip(results, swap))

    return kernel


def last_of_a_sum_dropped(op: Op, direction: str) -> Kernel:
    """The last row or column of every summed letter counts as zero, but its own result is right. In a running sum nothing else
    hangs on the last: there it is the first."""
    letters = {c for name in op.longest if name.startswith("grad ") == (direction == "backward") for c in op.summed(name)}
    names = list(op.arguments) if direction == "forward" else []

    def place_of(t: Tensor, letter: str, text: str, end: int) -> tuple[Any, ...] | None:
        tokens = text.split()
        if t.numel() == 0 or letter not in [token.strip("*") for token in tokens]:
            return None
        if f"*{letter}" in tokens:  # the starred letter is spread over the leading dimensions
            return (end,) * (t.dim() - len(tokens) + 1)
        return (..., end, *([slice(None)] * (len(tokens) - 1 - tokens.index(letter))))

    def shapes(args: tuple[Any, ...]) -> list[str]:
        if direction == "forward":
            return [op.shapes.get(name, "") for name in names]
        import inspect

        parameters = list(inspect.signature(op.backward).parameters)
        grads = [op.shapes[o] for o in op.outputs]
        return grads + [op.shapes.get(name, "") for name in parameters[len(grads) :]]

    def without(end: int, good: tuple[Tensor | None, ...], args: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        result_shapes = [op.shapes[n] for n in (*op.outputs, *op.saved)] if direction == "forward" else [op.shapes[n] for n in op.uses]
        cut = [a.clone() if isinstance(a, Tensor) else a for a in args]
        for letter in letters:
            for a, text in zip(cut, shapes(args)):
                where = place_of(a, letter, text, end) if isinstance(a, Tensor) and text else None
                if where is not None:
                    a[where] = 0
        bad = right(op, direction, *cut)
        for t, g, text in zip(bad, good, result_shapes):
            for letter in letters:
                where = place_of(t, letter, text, end) if t is not None else None
                if where is not None:
                    t[where] = g[where]
        return bad

    def kernel(*args: Any) -> tuple[Tensor | None, ...]:
        good = right(op, direction, *args)
        bad = without(-1, good, args)
        return bad if differ(bad, good) else without(0, good, args)

    return kernel


def differ(results: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    return any(t is not None and o is not None and not same_bits(t, o) for t, o in zip(results, others))


def error(results: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> tuple[int, float]:
    """Elements that are wrongly finite or not, and the sum of the squares of the other errors."""
    misplaced, squares = 0, 0.0
    for t, o in zip(results, exact):
        if t is not None and o is not None:
            t, o = t.double(), o.double()
            both = torch.isfinite(t) & torch.isfinite(o)
            misplaced += int((torch.isfinite(t) != torch.isfinite(o)).sum())
            squares += float((t - o)[both].square().sum())
    return misplaced, squares


def worse(bad: Sequence[Tensor | None], good: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> bool:
    """Whether `bad` is farther from the exact results than the right ones are, by a hundredth. Else no fault was planted:
    torch itself sums bfloat16 in float32, for one."""
    (misplaced, squares), (usual, usual_squares) = error(bad, exact), error(good, exact)
    return misplaced > usual or squares > 1.01 * usual_squares


def missing_cast(op: Op, direction: str) -> Kernel:
    """Everything is computed in the working dtype."""

    def kernel(*args: Any) -> tuple[Tensor | None, ...]:
        good = right(op, direction, *args)
        narrow = next(a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point())
        original = torch.promote_types
        torch.promote_types = lambda a, b: narrow
        try:
            low = right(op, direction, *[a.to(narrow) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args])
        finally:
            torch.promote_types = original
        return tuple(None if t is None else t.to(g.dtype) for t, g in zip(low, good))

    return kernel


def wrong_stride(op: Op, direction: str) -> Kernel:
    """Reads every input as if it were contiguous."""

    def dense(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        strides = torch.empty(t.shape, device="meta").stride()
        return t.as_strided(t.shape, strides, t.storage_offset())

    return lambda *args: right(op, direction, *map(dense, args))


def input_written(op: Op, direction: str) -> Kernel:
    def kernel(*args: Any) -> tuple[Tensor | None, ...]:
        results = right(op, direction, *args)
        for a in args:
            if isinstance(a, Tensor) and a.numel():
                a[(0,) * a.dim()] = 17.0
                break
        return results

    return kernel


def stale_result(op: Op, direction: str) -> Kernel:
    memory: dict[Any, tuple[Tensor | None, ...]] = {}

    def kernel(*args: Any) -> tuple[Tensor | None, ...]:
        key = tuple(a.shape if isinstance(a, Tensor) else a for a in args)
        return memory.setdefault(key, right(op, direction, *args))

    return kernel


def kept_buffer(op: Op, direction: str) -> Kernel:
    memory: dict[Any, tuple[Tensor | None, ...]] = {}

    def kernel(*args: Any) -> tuple[Tensor | None, ...]:
        results = right(op, direction, *args)
        key = tuple(a.shape if isinstance(a, Tensor) else a for a in args)
        for kept, t in zip(memory.setdefault(key, results), results):
            if t is not None:
                kept.copy_(t)
        return memory[key]

    return kernel


def one_nan(t: Tensor) -> Tensor:
    t = t.clone()
    if t.numel() > 1 and t.is_floating_point():
        t.view(-1)[t.numel() // 2] = float("nan")
    return t


FAULTS: dict[str, Callable[[Op, str], Kernel]] = {
    "zeros": each(torch.zeros_like),
    "the mean": each(lambda t: torch.full_like(t, float(t.double().mean()) if t.numel() else 0.0)),
    "an input returned": input_returned,
    "one tile skipped": each(skip_last_tile),
    "last of a sum dropped": last_of_a_sum_dropped,
    "a missing float32 cast": missing_cast,
    "a wrong stride": wrong_stride,
    "an input written to": input_written,
    "a stale result": stale_result,
    "a kept buffer": kept_buffer,
    "NaN where there should be none": each(one_nan),
    "scaled by 1.03": each(lambda t: (t.double() * 1.03).to(t.dtype)),
}


def applies(op: Op, direction: str, fault: str, dtype: str) -> bool:
    if fault == "a missing float32 cast":
        return dtype != "float32" and computes(op, direction)
    if fault == "last of a sum dropped":
        return any(name.startswith("grad ") == (direction == "backward") for name in op.longest)
    return True


def computes(op: Op, direction: str) -> bool:
    """Or it only moves what is there."""
    return op.flops[direction](**dict.fromkeys(cases_of(op).dims, 2)) > 0


DIRECTIONS = [
    (name, direction)
    for name, operator in OPERATORS.items()
    if operator.op.package.startswith("kdk_kernels.")
    for direction in ("forward", "backward")
    if operator.op.function(direction) is not None
    if direction == "forward" or not operator.op.backward_by  # else that operator's forward is tested
]


def rows() -> list[tuple[str, str, str, str]]:
    return [
        (name, direction, fault, dtype)
        for name, direction in DIRECTIONS
        for fault in FAULTS
        for dtype in ("float32", "bfloat16")
        if applies(OPERATORS[name].op, direction, fault, dtype)
    ]


def one_or_many(kernel: Kernel) -> Callable[..., Any]:
    """A kernel with a single result returns it bare. Launch parameters, which the one that it stands for has, change nothing."""

    def run(*args: Any, **launch: Any) -> Any:
        results = kernel(*args)
        return results[0] if len(results) == 1 else results

    return run


@functools.cache
def kernel_module(op_package: str, direction: str) -> Any:
    import importlib

    return importlib.import_module(f"{op_package}.triton{'' if direction == 'forward' else '_backward'}")


@pytest.mark.parametrize(("name", "direction", "fault", "dtype"), rows())
def test_a_planted_fault_fails(name: str, direction: str, fault: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPERATORS[name].op
    module = kernel_module(op.package, direction)
    planted, changed = FAULTS[fault](op, direction), []

    def kernel(*args: Any) -> tuple[Tensor | None, ...]:
        good = right(op, direction, *args)
        bad = planted(*args)
        with storing(getattr(torch, dtype)):
            exact = right(op, direction, *wider(op, args, torch.float64))
        changed.append(worse(bad, good, exact))
        return bad

    by_value = fault in ("a missing float32 cast", "an input returned")
    monkeypatch.setattr(module, direction, one_or_many(kernel if by_value else planted))
    monkeypatch.delattr(module, "supports", raising=False)
    results = run_row(Row(name, direction, "triton", "sm_90", dtype), place("triton", "sm_90"))
    if by_value and not any(changed):
        pytest.skip(f"{fault}: does not apply to {name}, no result is worse for it")
    assert "failed" in {r.outcome for r in results}, [(r.case, r.outcome, r.error_ratio) for r in results]


class Narrowed(TorchFunctionMode):
    """Whatever is computed in float32 is rounded to bfloat16: products, sums, all of it. float64 stays as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return result.bfloat16().float() if isinstance(result, Tensor) and result.dtype == torch.float32 else result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "direction"), [row for row in DIRECTIONS if computes(OPERATORS[row[0]].op, row[1])])
def test_a_reference_that_accumulates_in_bfloat16_fails(name: str, direction: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as bad in float32 as in the working dtype, so that it would be its own yardstick; the kernel here is right."""
    op = OPERATORS[name].op
    which = "reference" if direction == "forward" else "backward"
    faultless = getattr(op, which)

    @functools.wraps(faultless)
    def sloppy(*args: Any) -> Any:
        with Narrowed():
            return faultless(*args)

    monkeypatch.setattr(kernel_module(op.package, direction), direction, one_or_many(functools.partial(right, op, direction)))
    monkeypatch.setattr(OPERATORS[name], "op", dataclasses.replace(op, **{which: sloppy}))
    results = run_row(Row(name, direction, "triton", "sm_90", dtype), place("triton", "sm_90"))
    assert any(r.outcome == "failed" and "the reference fails its own check" in r.reason for r in results), [r.reason for r in results]


def test_a_kernel_with_another_number_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPERATORS["rms_norm"].op
    monkeypatch.setattr(kernel_module(op.package, "forward"), "forward", lambda x, *others: (x, x, x))
    results = run_row(Row("rms_norm", "forward", "triton", "sm_90", "float32"), place("triton", "sm_90"))
    counted = [r for r in results if "triton: got 3; 2: y, rstd" in r.reason]
    assert counted and all(r.outcome == "failed" and "KDK-RESULTS" in r.reason for r in counted)


def test_a_declaration_with_another_shape_than_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPERATORS["rms_norm"].op
    monkeypatch.setattr(OPERATORS["rms_norm"], "op", dataclasses.replace(op, shapes={**op.shapes, "y": "*N"}))
    results = run_row(Row("rms_norm", "forward", "reference", "cpu", "float32"), place("reference", "cpu"))
    assert any(r.outcome == "failed" and "y: `shapes` declares '*N'" in r.reason for r in results), [r.reason for r in results]


@pytest.mark.parametrize(("name", "direction"), DIRECTIONS)
def test_the_faultless_kernel_passes(name: str, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same way of planting, without a fault: otherwise the faults above might fail for another reason."""
    op = OPERATORS[name].op
    monkeypatch.setattr(kernel_module(op.package, direction), direction, one_or_many(functools.partial(right, op, direction)))
    for dtype in ("float32", "bfloat16", "float16"):
        results = run_row(Row(name, direction, "triton", "sm_90", dtype), place("triton", "sm_90"))
        assert {r.outcome for r in results} <= {"passed", "uninformative"}, [(r.case, r.reason) for r in results if r.reason]


@pytest.mark.parametrize("name", [n for n, o in OPERATORS.items() if o.op.package.startswith("kdk_kernels.")])
def test_the_models_shapes_are_complete(name: str) -> None:
    assert cases_of(OPERATORS[name].op).models
