"""Plain-torch spellings that scatter_add_rows replaces. Each takes (index, rows, num_rows) and equals the reference."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def index_added(index: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Of an index of one dimension, as the next two."""
    return rows.new_zeros(num_rows, rows.shape[1]).index_add(0, index, rows)


def scattered(index: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """The index repeated over the columns, as torch_scatter and torch_geometric have it."""
    return rows.new_zeros(num_rows, rows.shape[1]).scatter_add(0, index.long()[:, None].expand_as(rows), rows)


def one_hot(index: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return torch.nn.functional.one_hot(index.long(), num_rows).to(rows.dtype).T @ rows


def put(index: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return rows.new_zeros(num_rows, rows.shape[-1]).index_put((index,), rows, accumulate=True)


SPELLINGS: tuple[tuple[Callable[..., Tensor], Mapping[str, Any]], ...] = (
    (index_added, {}),
    (scattered, {}),
    (one_hot, {}),
    (put, {}),
)
"""(function, the scalar arguments with which the operator equals it)."""
