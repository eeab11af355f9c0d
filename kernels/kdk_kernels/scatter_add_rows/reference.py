"""scatter_add_rows in plain torch: the semantics every kernel is checked against."""

from typing import Any

import torch
from torch import Tensor

from kdk.errors import InputError


def scatter_add_rows(index: Tensor, rows: Tensor, num_rows: int, deterministic: bool = False) -> Tensor:
    """Rows added up where an index says: table[r] is the sum of the rows[i] with index[i] = r.

    N rows of H elements, R = num_rows in the result; messages summed at the nodes of a graph, the gradient of an embedding. A row
    that no number names is zero. Summed in float32 (float64 for float64) and rounded once, where atomics in bfloat16, as
    of torch's index_add on a GPU, round after every addition. Semantics: zeros(R, H).index_add(0, index, rows).

    Args:
        index: (...) with N numbers in all, int64 or int32, each in [0, R). Under kdk.strict() a number out of range raises;
            otherwise nobody looks, and what comes of it is undefined. Kernels read int32: int64 is converted in every call.
        rows: (..., H), the dimensions of index and one more; float32, bfloat16, float16 or float64, any strides.
        num_rows: R.
        deterministic: the same bits in every run. Otherwise the order of the additions may differ from run to run (atomics on
            GPUs). Where many numbers are equal the deterministic way, which sorts first, may also be the faster one.

    Returns:
        table: (R, H), the dtype of rows, contiguous.

    Raises:
        kdk.errors.InputError: shapes or dtypes that do not fit; under kdk.strict() numbers out of range.

    Gradients: rows, by `gather_rows`.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    zeros = torch.zeros((num_rows, rows.shape[-1]), dtype=wide, device=rows.device)
    flat, values = index.reshape(-1), rows.reshape(index.numel(), rows.shape[-1]).to(wide)
    # On GPUs index_put with accumulate sorts, index_add uses atomics.
    table = zeros.index_put((flat,), values, accumulate=True) if deterministic else zeros.index_add(0, flat, values)
    return table.to(rows.dtype)


def scatter_add_rows_backward(grad: Tensor, index: Tensor, needs: str) -> Tensor:
    """The gradient of `scatter_add_rows` with respect to the rows: that of the row that each was added to."""
    return grad.index_select(0, index.reshape(-1)).reshape(*index.shape, grad.shape[1])


def as_gather_rows(grad: Tensor, index: Tensor, needs: str) -> tuple[Any, ...]:
    """The arguments with which `gather_rows` is this backward."""
    return grad, index


def check(index: Tensor, rows: Tensor, num_rows: int, deterministic: bool = False) -> None:
    """Raise InputError unless the arguments are what `scatter_add_rows` takes."""
    if rows.dim() != index.dim() + 1 or rows.shape[:-1] != index.shape:
        limit = f"({', '.join(str(n) for n in (*index.shape, 'H'))}), the shape of index and one dimension more"
        way_out = "rows.flatten(index.dim()) where a row has more dimensions"
        raise InputError("SCATTER-ROWS", "scatter_add_rows: the shape of rows", value=tuple(rows.shape), limit=limit, way_out=way_out)
    if num_rows < 0 or (num_rows == 0 and index.numel() > 0):
        limit = "at least 0, and at least 1 where index holds numbers"
        way_out = "the number of rows of the result"
        raise InputError("SCATTER-SIZE", "scatter_add_rows: num_rows", value=num_rows, limit=limit, way_out=way_out)
