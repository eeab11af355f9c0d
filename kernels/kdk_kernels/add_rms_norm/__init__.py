"""add_rms_norm: the residual sum of a transformer block and its root-mean-square normalisation."""

from kdk import Op
from kdk_kernels.add_rms_norm import reference

op = Op(
    reference=reference.add_rms_norm,
    backward=reference.add_rms_norm_backward,
    check=reference.check,
    kind="row",
    outputs=("y", "new_residual"),
    saved=("rstd",),
    shapes={"x": "*N H", "residual": "*N H", "weight": "H", "y": "*N H", "new_residual": "*N H", "rstd": "*N"},
    uses={
        "x": ("new_residual", "weight", "rstd"),
        "residual": ("new_residual", "weight", "rstd"),
        "weight": ("new_residual", "weight", "rstd"),
    },
    longest={"y": "H", "rstd": "H", "grad x": "H", "grad residual": "H", "grad weight": "N"},
    independent=("N",),
    flops={"forward": lambda N, H: 5 * N * H, "backward": lambda N, H: 12 * N * H},
    mixed={"weight": "float32"},
    neighbours=("linear",),
)
