"""Two outputs, each of one input: an output that nothing flows back to leaves its input without a gradient."""

from kdk import Op

from . import reference

op = Op(
    reference=reference.scale_both,
    backward=reference.scale_both_backward,
    check=reference.check,
    independent=("N", "H"),
    kind="elementwise",
    outputs=("left", "right"),
    shapes={"a": "N H", "b": "N", "left": "N H", "right": "N"},
    uses={"a": (), "b": ()},
)
