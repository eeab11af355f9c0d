"""logcumsumexp: logarithms of sums of exponentials over time, from the start to every step."""

from kdk import Op
from kdk_kernels.logcumsumexp import reference

op = Op(
    reference=reference.logcumsumexp,
    backward=reference.logcumsumexp_backward,
    fake_backward=reference.fake_backward,
    check=reference.check,
    kind="algorithmic",
    outputs=("y",),
    shapes={"x": "*B T D", "y": "*B T D"},
    uses={"x": ("x", "y")},
    longest={"y": "T", "grad x": "T"},
    independent=("B", "D"),
    flops={"forward": lambda B, T, D: 8 * B * T * D, "backward": lambda B, T, D: 7 * B * T * D},
    fills=("aten::logcumsumexp",),
)
