"""Integer outputs only, and no backward."""

from kdk import Op

from . import reference

op = Op(
    reference=reference.positions,
    check=reference.check,
    independent=("N",),
    kind="algorithmic",
    outputs=("order", "largest"),
    shapes={"x": "N H", "order": "N H", "largest": "N"},
)
