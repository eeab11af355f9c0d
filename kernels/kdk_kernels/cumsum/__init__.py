"""cumsum: sums over time from the start to every step, in float32."""

from kdk import Op
from kdk_kernels.cumsum import reference

op = Op(
    reference=reference.cumsum,
    backward=reference.cumsum_backward,
    check=reference.check,
    kind="algorithmic",
    outputs=("y",),
    shapes={"x": "*B T D", "y": "*B T D"},
    uses={"x": ()},
    longest={"y": "T", "grad x": "T"},
    independent=("B", "D"),
    flops={"forward": lambda B, T, D: B * T * D, "backward": lambda B, T, D: B * T * D},
    fills=("aten::cumsum",),
)
