"""group_norm_silu: group normalisation and SiLU in one, as in the residual blocks of diffusion models."""

from kdk import Op
from kdk_kernels.group_norm_silu import reference

READS = ("x", "weight", "bias", "mean", "rstd")

op = Op(
    reference=reference.group_norm_silu,
    backward=reference.group_norm_silu_backward,
    check=reference.check,
    kind="row",
    outputs=("y",),
    saved=("mean", "rstd"),
    shapes={"x": "N C *P", "weight": "C", "bias": "C", "y": "N C *P", "mean": "N G", "rstd": "N G"},
    uses={"x": READS, "weight": READS, "bias": READS},
    longest={
        "y": "P C/G", "mean": "P C/G", "rstd": "P C/G",
        "grad x": "P C/G", "grad weight": "N P", "grad bias": "N P",
    },
    independent=("N",),
    flops={"forward": lambda N, C, G, P: 13 * N * C * P, "backward": lambda N, C, G, P: 33 * N * C * P},
    mixed={"weight": "float32", "bias": "float32"},
    sized={"G": "groups"},
    layouts=("channels_last",),
)  # fmt: skip
