"""A tensor argument that the backward has no gradient for."""

from kdk import Op

from . import reference

op = Op(
    reference=reference.times_table,
    backward=reference.times_table_backward,
    check=reference.check,
    independent=("N", "H"),
    kind="algorithmic",
    outputs=("y",),
    shapes={"x": "N H", "table": "H", "y": "N H"},
    uses={"x": ("table",)},
)
