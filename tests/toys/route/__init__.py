"""A discrete choice, whose size is an argument, and weights that belong to it; a bias that may be left out; scalars that may be None."""

from kdk import Op
from kdk.compare import Choice

from . import reference

op = Op(
    reference=reference.route,
    backward=reference.route_backward,
    check=reference.check,
    independent=("N",),
    kind="algorithmic",
    outputs=("weights", "experts"),
    saved=("scores",),
    shapes={"x": "*N E", "bias": "E", "weights": "*N K", "experts": "*N K", "scores": "*N E"},
    uses={"x": ("experts", "scores")},
    sized={"K": "k"},
    longest={"weights": "E", "experts": "E", "scores": "E", "grad x": "E"},
    choice=Choice(outputs=("experts",), valid=reference.valid, given=reference.given),
)
