"""Indices into another tensor, of int64 or int32; its backward is another operator."""

from typing import Any

from torch import Tensor

from kdk import Op

from . import reference


def as_add_at(grad: Tensor, table: Tensor, index: Tensor, needs: str) -> tuple[Any, ...]:
    return index, grad, table.shape[0]


op = Op(
    reference=reference.pick_rows,
    backward=reference.pick_rows_backward,
    backward_by="add_at",
    backward_as=as_add_at,
    check=reference.check,
    independent=("N", "H"),
    kind="algorithmic",
    outputs=("rows",),
    shapes={"table": "R H", "index": "N", "rows": "N H"},
    uses={"table": ("table", "index")},
    indexes={"index": "R"},
    longest={"grad table": "N"},
)
