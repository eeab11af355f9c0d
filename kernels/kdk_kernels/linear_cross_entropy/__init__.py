"""linear_cross_entropy: the head of a language model and its loss, without the logits."""

from kdk import Op
from kdk_kernels.linear_cross_entropy import reference

READS = ("x", "weight", "target", "bias", "lse")

op = Op(
    reference=reference.linear_cross_entropy,
    backward=reference.linear_cross_entropy_backward,
    check=reference.check,
    kind="algorithmic",
    outputs=("loss",),
    saved=("lse",),
    shapes={"x": "*N H", "weight": "V H", "target": "*N", "bias": "V", "loss": "*N", "lse": "*N"},
    uses={"x": READS, "weight": READS, "bias": READS},
    longest={"loss": "H", "lse": "H", "grad x": "V", "grad weight": "N", "grad bias": "N"},
    independent=("N",),
    indexes={"target": "V"},
    sentinels={"target": "ignore_index"},
    public=reference.reduced,
    flops={"forward": lambda N, H, V: 2 * N * H * V + 5 * N * V, "backward": lambda N, H, V: 6 * N * H * V + 8 * N * V},
)
