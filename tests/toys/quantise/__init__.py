"""Quantised rows with a scale each; the dtype is an argument."""

from kdk import Op
from kdk.compare import Quantised

from . import reference

op = Op(
    reference=reference.quantise,
    check=reference.check,
    independent=("N",),
    kind="algorithmic",
    outputs=("q", "scale"),
    shapes={"x": "*N H", "q": "*N H", "scale": "*N"},
    quantised={"q": Quantised(scale="scale", of=reference.values)},
)
