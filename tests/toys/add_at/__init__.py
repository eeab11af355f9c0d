"""A letter that is a scalar argument: the size of the result. Integers first."""

from kdk import Op

from . import reference

op = Op(
    reference=reference.add_at,
    backward=reference.add_at_backward,
    check=reference.check,
    independent=("H",),
    kind="algorithmic",
    outputs=("table",),
    shapes={"index": "N", "rows": "N H", "table": "R H"},
    uses={"rows": ("index",)},
    indexes={"index": "R"},
    sized={"R": "size"},
    longest={"table": "N"},
)
