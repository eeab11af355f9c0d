"""Memory formats that are kept; a starred letter at the end; a letter of no tensor that is an argument."""

from kdk import Op

from . import reference

op = Op(
    reference=reference.norm_groups,
    backward=reference.norm_groups_backward,
    check=reference.check,
    independent=("N",),
    kind="algorithmic",
    outputs=("y",),
    shapes={"x": "N C *P", "y": "N C *P"},
    uses={"x": ()},
    sized={"G": "groups"},
    longest={"y": "C P", "grad x": "C P"},
    layouts=("channels_last",),
)
