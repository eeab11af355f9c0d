"""rms_norm: root-mean-square normalisation, Gemma's (1 + weight) included."""

from kdk import Op
from kdk_kernels.rms_norm import reference

op = Op(
    reference=reference.rms_norm,
    backward=reference.rms_norm_backward,
    check=reference.check,
    kind="row",
    outputs=("y",),
    saved=("rstd",),
    shapes={"x": "*N H", "weight": "H", "y": "*N H", "rstd": "*N"},
    uses={"x": ("x", "weight", "rstd"), "weight": ("x", "weight", "rstd")},
    longest={"y": "H", "rstd": "H", "grad x": "H", "grad weight": "N"},
    independent=("N",),
    flops={"forward": lambda N, H: 4 * N * H, "backward": lambda N, H: 11 * N * H},
    mixed={"weight": "float32"},
    fills=("aten::rms_norm", "aten::_fused_rms_norm"),
    neighbours=("linear",),
)
