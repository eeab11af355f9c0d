"""A second way in plain torch (`algorithm.py`), which refuses some inputs."""

from kdk import Op

from . import reference

op = Op(
    reference=reference.cube,
    backward=reference.cube_backward,
    check=reference.check,
    independent=("N", "H"),
    kind="algorithmic",
    outputs=("y",),
    shapes={"x": "N H", "y": "N H"},
    uses={"x": ("x",)},
)
