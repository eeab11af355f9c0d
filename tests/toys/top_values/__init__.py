"""Saved tensor of integers, and an integer scalar."""

from kdk import Op

from . import reference

op = Op(
    reference=reference.top_values,
    backward=reference.top_values_backward,
    check=reference.check,
    independent=("N",),
    kind="algorithmic",
    outputs=("values",),
    saved=("indices",),
    shapes={"x": "N H", "values": "N K", "indices": "N K"},
    sized={"K": "k"},
    uses={"x": ("x", "indices")},
)
