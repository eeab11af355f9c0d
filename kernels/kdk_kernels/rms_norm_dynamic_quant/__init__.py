"""rms_norm_dynamic_quant: a norm whose result goes to an 8-bit matmul, with a scale for every token."""

from kdk import Op
from kdk.compare import Quantised
from kdk_kernels.rms_norm_dynamic_quant import reference

op = Op(
    reference=reference.rms_norm_dynamic_quant,
    check=reference.check,
    kind="row",
    outputs=("q", "scale"),
    shapes={"x": "*N H", "weight": "H", "q": "*N H", "scale": "*N"},
    longest={"q": "H", "scale": "H"},
    independent=("N",),
    flops={"forward": lambda N, H: 7 * N * H},
    mixed={"weight": "float32"},
    quantised={"q": Quantised(scale="scale", of=reference.values)},
    neighbours=("linear",),
)
