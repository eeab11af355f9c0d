"""gather_rows and scatter_add_rows: what the declarations do not say."""

from __future__ import annotations

import itertools
import mmap

import pytest
import torch
from torch import Tensor

import kdk
import kdk.ops
from kdk.errors import InputError
from kdk_kernels.gather_rows import patterns as gather_patterns
from kdk_kernels.scatter_add_rows import patterns as scatter_patterns

LANGUAGES = ("triton", "nki")


def problem(N: int = 40, R: int = 7, H: int = 12, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """A table, an index with its first and last row, and rows."""
    generator = torch.Generator().manual_seed(N + R)
    index = torch.randint(0, R, (N,), generator=generator)
    index[: min(N, 2)] = torch.tensor([R - 1, 0])[: min(N, 2)]
    return torch.randn(R, H, generator=generator).to(dtype), index, torch.randn(N, H, generator=generator).to(dtype)


@pytest.mark.parametrize("spelling", [f for f, _ in gather_patterns.SPELLINGS], ids=lambda f: f.__name__)
def test_spellings_of_gather(spelling: object) -> None:
    table, index, _ = problem()
    assert callable(spelling) and torch.equal(spelling(table, index), kdk.ops.gather_rows(table, index))


@pytest.mark.parametrize("spelling", [f for f, _ in scatter_patterns.SPELLINGS], ids=lambda f: f.__name__)
def test_spellings_of_scatter(spelling: object) -> None:
    _, index, rows = problem(dtype=torch.float64)
    assert callable(spelling)
    torch.testing.assert_close(spelling(index, rows, 7), kdk.ops.scatter_add_rows(index, rows, 7))


def test_each_is_the_other_s_gradient() -> None:
    table, index, rows = problem(dtype=torch.float64)
    table.requires_grad_(), rows.requires_grad_()
    assert torch.autograd.gradcheck(lambda t: kdk.ops.gather_rows(t, index), (table,))
    assert torch.autograd.gradcheck(lambda r: kdk.ops.scatter_add_rows(index, r, 9), (rows,))
    for language in LANGUAGES:
        with kdk.record() as r, kdk.use(language):
            kdk.ops.scatter_add_rows(index, kdk.ops.gather_rows(table.detach().float().requires_grad_(), index), 7).sum().backward()
        assert {(row.op, row.direction, row.implementation) for row in r.rows} == {
            (op, direction, language)
            for op, direction in itertools.product(("gather_rows", "scatter_add_rows"), ("forward", "backward"))
        }


def test_an_index_of_two_dimensions_is_an_embedding() -> None:
    table, index, _ = problem()
    table.requires_grad_()
    square = index.reshape(5, 8)
    found = kdk.ops.gather_rows(table, square)
    assert torch.equal(found, torch.nn.functional.embedding(square, table))
    weights = torch.randn(5, 8, 12)
    (mine,) = torch.autograd.grad((found * weights).sum(), table)
    (theirs,) = torch.autograd.grad((torch.nn.functional.embedding(square, table) * weights).sum(), table)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_both_integers(language: str, dtype: torch.dtype) -> None:
    table, index, rows = problem()
    expected = torch.zeros(7, 12).index_add(0, index, rows)
    with kdk.use(language), kdk.strict():
        assert torch.equal(kdk.ops.gather_rows(table, index.to(dtype)), table[index])
        for deterministic in (False, True):
            torch.testing.assert_close(kdk.ops.scatter_add_rows(index.to(dtype), rows, 7, deterministic), expected)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_hot_row(language: str, deterministic: bool) -> None:
    """All numbers equal, and a run that begins and ends within a piece (Triton's 64) or a tile (NKI's 128)."""
    for count, others in ((300, 0), (150, 20), (64, 64), (1, 0)):
        index = torch.cat([torch.arange(others) % 2, torch.full((count,), 2), torch.arange(others) % 2 + 3])
        rows = torch.randint(-9, 9, (len(index), 5)).float()  # whole numbers: exact in any order
        with kdk.use(language), kdk.strict():
            assert torch.equal(kdk.ops.scatter_add_rows(index, rows, 6, deterministic), torch.zeros(6, 5).index_add(0, index, rows))


@pytest.mark.parametrize("language", LANGUAGES)
def test_infinities_stay_in_their_row(language: str) -> None:
    _, index, rows = problem(R=5)
    rows[3, 2], rows[4, 1] = torch.inf, torch.nan
    expected = torch.zeros(5, 12).index_add(0, index, rows)
    for deterministic in (False, True):
        with kdk.use(language), kdk.strict():
            found = kdk.ops.scatter_add_rows(index, rows, 5, deterministic)
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_sums_are_rounded_once() -> None:
    """256 + 1 + 1 ... in bfloat16, where torch's own index_add stays at 256."""
    rows = torch.ones(257, 1, dtype=torch.bfloat16)
    rows[0] = 256
    index = torch.zeros(257, dtype=torch.int32)
    for language in ("reference", *LANGUAGES):
        with kdk.use(language):
            assert kdk.ops.scatter_add_rows(index, rows, 1).item() == 512


def test_deterministic_is_the_same_in_every_run() -> None:
    _, index, rows = problem(500, 6)
    with kdk.use("triton"), kdk.strict():
        first = kdk.ops.scatter_add_rows(index, rows, 6, deterministic=True)
        assert torch.equal(first, kdk.ops.scatter_add_rows(index, rows, 6, deterministic=True))


def test_a_table_past_2_31_elements() -> None:
    """A view of which only the rows that are read exist; both its first and its last row."""
    R, H = 2**20, 4096
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = torch.frombuffer(mmap.mmap(-1, 4 * R * H, flags=flags), dtype=torch.float32)
    table = memory.view(R, H)[:, :32]
    index = torch.tensor([R - 1, 0, R // 2 + 1])
    table[index] = torch.randn(3, 32)
    with kdk.use("triton"), kdk.strict():
        assert torch.equal(kdk.ops.gather_rows(table, index), table[index])


@pytest.mark.parametrize("value", [7, -1])
def test_out_of_range(value: int) -> None:
    table, index, rows = problem()
    index[5] = value
    for language in ("", *LANGUAGES):
        with kdk.use(language) if language else kdk.use(), kdk.strict():
            with pytest.raises(InputError, match="index holds a value out of range"):
                kdk.ops.gather_rows(table, index)
            with pytest.raises(InputError, match="index holds a value out of range"):
                kdk.ops.scatter_add_rows(index, rows, 7)


def test_what_is_refused() -> None:
    table, index, rows = problem()
    for wrong in (table[None], table[0]):
        with pytest.raises(InputError, match="GATHER-TABLE"):
            kdk.ops.gather_rows(wrong, index)
    with pytest.raises(InputError, match="GATHER-EMPTY"):
        kdk.ops.gather_rows(table[:0], index)
    for wrong in (rows[:-1], rows[0], rows[None]):
        with pytest.raises(InputError, match="SCATTER-ROWS"):
            kdk.ops.scatter_add_rows(index, wrong, 7)
    for size in (0, -1):
        with pytest.raises(InputError, match="SCATTER-SIZE"):
            kdk.ops.scatter_add_rows(index, rows, size)
    assert kdk.ops.gather_rows(table[:0], index[:0]).shape == (0, 12)
    assert kdk.ops.scatter_add_rows(index[:0], rows[:0], 3).tolist() == [[0.0] * 12] * 3
    assert kdk.ops.scatter_add_rows(index[:0], rows[:0], 0).shape == (0, 12)
