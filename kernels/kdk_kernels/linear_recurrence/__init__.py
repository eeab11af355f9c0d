"""linear_recurrence: h_t = a_t * h_{t-1} + b_t along time, the scan of state-space and gated models."""

from kdk import Op
from kdk_kernels.linear_recurrence import reference

op = Op(
    reference=reference.linear_recurrence,
    backward=reference.linear_recurrence_backward,
    fake=reference.fake,
    fake_backward=reference.fake_backward,
    check=reference.check,
    kind="algorithmic",
    outputs=("h",),
    shapes={"a": "*B T D", "b": "*B T D", "h0": "*B D", "h": "*B T D"},
    uses={"a": ("a", "h", "h0"), "b": ("a",), "h0": ("a", "h0")},
    longest={"h": "T", "grad a": "T", "grad b": "T", "grad h0": "T"},
    independent=("B", "D"),
    flops={"forward": lambda B, T, D: 2 * B * T * D, "backward": lambda B, T, D: 3 * B * T * D},
    mixed={"a": "float32", "h0": "float32"},
    neighbours=("linear",),
)
