"""add_rms_norm_dynamic_quant: the residual sum, its norm, and the norm in 8 bits with a scale for every token."""

from kdk import Op
from kdk.compare import Quantised
from kdk_kernels.add_rms_norm_dynamic_quant import reference

op = Op(
    reference=reference.add_rms_norm_dynamic_quant,
    check=reference.check,
    kind="row",
    outputs=("q", "scale", "new_residual"),
    shapes={"x": "*N H", "residual": "*N H", "weight": "H", "q": "*N H", "scale": "*N", "new_residual": "*N H"},
    longest={"q": "H", "scale": "H"},
    independent=("N",),
    flops={"forward": lambda N, H: 8 * N * H},
    mixed={"weight": "float32"},
    quantised={"q": Quantised(scale="scale", of=reference.values)},
    neighbours=("linear",),
)
