"""Plain-torch spellings that gather_rows replaces. Each takes (table, index) and equals the reference."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def indexed(table: Tensor, index: Tensor) -> Tensor:
    return table[index]


def selected(table: Tensor, index: Tensor) -> Tensor:
    """Of an index of one dimension."""
    return torch.index_select(table, 0, index)


def embedding(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index, table)


def gathered(table: Tensor, index: Tensor) -> Tensor:
    """The index repeated over the columns, as torch_scatter and older graph libraries have it; of one dimension."""
    return table.gather(0, index.long()[:, None].expand(-1, table.shape[1]))


SPELLINGS: tuple[tuple[Callable[..., Tensor], Mapping[str, Any]], ...] = (
    (indexed, {}),
    (selected, {}),
    (embedding, {}),
    (gathered, {}),
)
"""(function, the scalar arguments with which the operator equals it)."""
