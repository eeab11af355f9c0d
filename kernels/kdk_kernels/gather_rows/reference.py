"""gather_rows in plain torch: the semantics every kernel is checked against."""

from typing import Any

import torch
from torch import Tensor

from kdk.errors import InputError


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table by their numbers: rows[i] = table[index[i]].

    R rows of H elements in the table, N rows in the result; an embedding, or the neighbours' features in a graph. The values of the
    table, NaN and infinities included. Semantics: torch.index_select along dimension 0, and torch.nn.functional.embedding for an
    index of more dimensions.

    Args:
        table: (R, H), float32, bfloat16, float16 or float64, any strides; more than 2^31 elements, too.
        index: (...) with N numbers in all, int64 or int32, each in [0, R). In any order, as often as you like. Under kdk.strict()
            a number out of range raises; otherwise nobody looks, and what comes of it is undefined: an error, a fault of the
            device, or rows that mean nothing. Kernels read int32: int64 is converted in every call, so int32 is faster.

    Returns:
        rows: (..., H), like table, contiguous.

    Raises:
        kdk.errors.InputError: shapes or dtypes that do not fit; under kdk.strict() numbers out of range.

    Gradients: table, by `scatter_add_rows` with deterministic=True: rows that were taken often are summed in float32 and rounded
    once. It is as large as the table, and dense.
    """
    return table.index_select(0, index.reshape(-1)).reshape(*index.shape, table.shape[1])


def gather_rows_backward(grad: Tensor, table: Tensor, index: Tensor, needs: str) -> Tensor:
    """The gradient of `gather_rows` with respect to the table: the sum of the gradients of each row's copies."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    zeros = torch.zeros(table.shape, dtype=wide, device=grad.device)
    values = grad.reshape(index.numel(), table.shape[1]).to(wide)
    return zeros.index_put((index.reshape(-1),), values, accumulate=True).to(table.dtype)


def as_scatter_add_rows(grad: Tensor, table: Tensor, index: Tensor, needs: str) -> tuple[Any, ...]:
    """The arguments with which `scatter_add_rows` is this backward."""
    return index, grad, table.shape[0], True


def check(table: Tensor, index: Tensor) -> None:
    """Raise InputError unless the arguments are what `gather_rows` takes."""
    if table.dim() != 2:
        limit, way_out = "(R, H)", "table.flatten(1) and rows.unflatten(-1, ...) where a row has more dimensions"
        raise InputError("GATHER-TABLE", "gather_rows: the shape of table", value=tuple(table.shape), limit=limit, way_out=way_out)
    if table.shape[0] == 0 and index.numel() > 0:
        limit, way_out = "a table with rows, or an index without numbers", "check where the table comes from"
        raise InputError("GATHER-EMPTY", "gather_rows: no rows to take", value=tuple(table.shape), limit=limit, way_out=way_out)
