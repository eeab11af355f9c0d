"""Arguments that are no floating-point tensors: indices, None, dtypes; a public function; a backward by another operator."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tests.inputs import arguments
from torch import Tensor

import kdk
from kdk import dispatch, registry
from kdk.errors import DeclarationError, InputError
from kdk.indices import Indices
from kdk_bench import stubs


def ops(name: str) -> Any:
    return registry.OPERATORS[name]


# ---- indices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_both_integers_are_taken(dtype: torch.dtype) -> None:
    table = torch.randn(5, 3, requires_grad=True)
    index = torch.tensor([4, 0, 4], dtype=dtype)
    found = kdk.ops.pick_rows(table, index)
    assert torch.equal(found, table[index.long()])
    found.sum().backward()
    assert table.grad is not None and table.grad[:, 0].tolist() == [1, 0, 0, 0, 2]


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.bool, torch.float32])
def test_other_dtypes_are_refused_in_every_call(dtype: torch.dtype) -> None:
    table = torch.randn(5, 3)
    kdk.ops.pick_rows(table, torch.tensor([1]))
    for call in (kdk.ops.pick_rows, torch.ops.kdk.pick_rows):
        with pytest.raises(InputError, match=r"the dtype of index.*int64 or int32"):
            call(table, torch.ones(2, dtype=dtype))


def test_values_out_of_range_under_strict() -> None:
    table = torch.randn(5, 3)
    for value in (5, -1, 2**32 + 1):
        with kdk.use("torch"), kdk.strict(), pytest.raises(InputError, match=r"index holds a value.*got .*0 to 4, as R is 5"):
            kdk.ops.pick_rows(table, torch.tensor([0, value]))
    with kdk.strict():
        kdk.ops.pick_rows(table, torch.tensor([4]))
        kdk.ops.row_loss(torch.randn(2, 4), torch.tensor([3, -100]))
        with pytest.raises(InputError, match="0 to 3, as V is 4, or -100"):
            torch.ops.kdk.row_loss(torch.randn(2, 4), torch.tensor([3, -1]), impl="torch!")


def test_kernels_get_int32_where_it_fits() -> None:
    index = torch.tensor([1, 2])
    pick, add, loss = (Indices(ops(name).op, "forward") for name in ("pick_rows", "add_at", "row_loss"))
    table = torch.empty(5, 3)
    assert pick.narrowed((table, index))[1].dtype == torch.int32
    wide = torch.empty(1, 3).expand(2**31, 3)
    assert pick.narrowed((wide, index))[1].dtype == torch.int64
    assert add.narrowed((index, table, 2**31))[0].dtype == torch.int64
    assert add.narrowed((index, table, 2**31 - 1))[0].dtype == torch.int32
    assert loss.narrowed((table, index, -(2**40)))[1].dtype == torch.int64
    assert loss.narrowed((table, index, -100))[1].dtype == torch.int32
    backward = Indices(ops("pick_rows").op, "backward")
    assert backward.narrowed((table, table, index, "table"))[2].dtype == torch.int32
    assert backward.narrowed((table, None, index, "table"))[2].dtype == torch.int64  # nothing says how large the letter is
    assert not Indices(ops("cube").op, "forward")


def test_the_reference_sees_what_the_user_gave() -> None:
    with kdk.record() as r, kdk.use("triton"):
        assert kdk.ops.pick_rows(torch.randn(5, 3), torch.tensor([1])).shape == (1, 3)
    assert r.calls("pick_rows", implementation="torch") == 1


# ---- a backward by another operator -----------------------------------------------------------------------------------


def test_the_other_operator_s_kernel_runs() -> None:
    op = ops("pick_rows").op
    assert dispatch.kernel_file(op, "torch", "backward") == f"{ops('add_at').op.package}.algorithm"
    assert dispatch.kernel_file(op, "triton", "backward") is None
    table = torch.randn(5, 3, requires_grad=True)
    with kdk.record() as r:
        kdk.ops.pick_rows(table, torch.tensor([1, 1])).sum().backward()
    assert r.calls("pick_rows", "backward", implementation="torch") == 1
    assert table.grad is not None and table.grad[1].tolist() == [2, 2, 2]


def test_an_operator_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry.OPERATORS, "add_at")
    with pytest.raises(DeclarationError, match="`backward_by`: got add_at; another registered operator with one output"):
        dispatch.kernel_file(ops("pick_rows").op, "torch", "backward")


# ---- what users call --------------------------------------------------------------------------------------------------


def test_a_public_function() -> None:
    x, target = torch.randn(4, 6, requires_grad=True), torch.tensor([0, 5, -100, 2])
    expected = torch.nn.functional.cross_entropy(x, target)
    torch.testing.assert_close(kdk.ops.row_loss(x, target), expected)
    torch.testing.assert_close(kdk.ops.row_loss(x, target, reduction="none"), ops("row_loss").call(x, target))
    compiled = torch.compile(lambda x: kdk.ops.row_loss(x, target, reduction="sum"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), torch.nn.functional.cross_entropy(x, target, reduction="sum"))
    with kdk.record() as r, kdk.use("reference"):
        kdk.ops.row_loss(x, target).backward()
    assert r.calls("row_loss", how="inlined") == 1
    op = ops("row_loss").op
    assert list(inspect.signature(kdk.ops.row_loss).parameters) == ["x", "target", "ignore_index", "reduction"]
    assert kdk.ops.row_loss.__name__ == "row_loss" and kdk.ops.row_loss.__doc__ == op.summary == "The loss over all rows."
    assert "ignore_index: int = -100, reduction: str = 'mean') -> Tensor:" in stubs._function(op)


def test_dtypes_are_arguments() -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        q, scale = kdk.ops.quantise(x, dtype=dtype)
        assert (q.dtype, scale.dtype) == (dtype, torch.float32)
    assert "dtype: torch.dtype = torch.int8" in stubs._function(ops("quantise").op)


class Model(torch.nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        weights, experts = kdk.ops.route(kdk.ops.pick_rows(x, index), None, 2, scale=2.0)
        return weights, experts, *kdk.ops.quantise(x, torch.float8_e5m2), kdk.ops.norm_groups(x[:, :, None, None], 2)


def test_export(tmp_path: Any) -> None:
    """None, dtypes, integer results and letters that are arguments survive a saved program."""
    args = torch.randn(6, 4), torch.tensor([5, 0, 1])
    program = torch.export.export(Model(), args)
    torch.export.save(program, tmp_path / "model.pt2")
    found = torch.export.load(tmp_path / "model.pt2").module()(*args)
    for a, b in zip(found, Model()(*args)):
        assert a.dtype == b.dtype and torch.equal(a.double(), b.double())


@pytest.mark.parametrize("rank", [4, 5])
def test_channels_last_is_kept(rank: int) -> None:
    kept = torch.channels_last if rank == 4 else torch.channels_last_3d
    x = torch.randn(2, 4, *[3] * (rank - 2)).to(memory_format=kept).requires_grad_()
    for function in (kdk.ops.norm_groups, torch.compile(kdk.ops.norm_groups, fullgraph=True, backend="aot_eager")):
        for choice in ("torch", "reference"):
            y = torch.ops.kdk.norm_groups(x, 2, impl=choice) if choice == "reference" else function(x, 2)
            assert y.is_contiguous(memory_format=kept) and not y.is_contiguous()
            (grad,) = torch.autograd.grad(y.square().sum(), x)
            assert grad.is_contiguous(memory_format=kept)
    assert kdk.ops.norm_groups(x.detach().contiguous(), 2).is_contiguous()
    assert kdk.ops.norm_groups(x.detach().transpose(2, 3).contiguous().transpose(2, 3), 2).is_contiguous()


def test_left_out_tensors() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    kdk.ops.add_bias(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 4))
    values = arguments(ops("route").op, grad=True) | {"bias": None}
    torch.library.opcheck(ops("route").forward, tuple(values.values()))
    compiled = torch.compile(lambda x: kdk.ops.route(x, None, 2)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), kdk.ops.route(x)[0])
