"""Targets with a value that means none, and a public function that makes the last sum."""

from kdk import Op

from . import reference

op = Op(
    reference=reference.row_loss,
    backward=reference.row_loss_backward,
    check=reference.check,
    public=reference.public,
    independent=("N",),
    kind="algorithmic",
    outputs=("loss",),
    shapes={"x": "N V", "target": "N", "loss": "N"},
    uses={"x": ("x", "target")},
    indexes={"target": "V"},
    sentinels={"target": "ignore_index"},
    longest={"loss": "V", "grad x": "V"},
)
