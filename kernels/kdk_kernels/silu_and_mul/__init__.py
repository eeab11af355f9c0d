"""silu_and_mul: the gated activation of a SwiGLU feed-forward block."""

from kdk import Op
from kdk_kernels.silu_and_mul import reference

op = Op(
    reference=reference.silu_and_mul,
    backward=reference.silu_and_mul_backward,
    check=reference.check,
    kind="elementwise",
    outputs=("y",),
    shapes={"gate": "*N H", "up": "*N H", "y": "*N H"},
    uses={"gate": ("gate", "up"), "up": ("gate",)},
    independent=("N", "H"),
    flops={"forward": lambda N, H: 5 * N * H, "backward": lambda N, H: 13 * N * H},
    neighbours=("linear",),
)
