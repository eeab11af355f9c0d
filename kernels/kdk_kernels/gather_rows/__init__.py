"""gather_rows: rows of a table by their numbers. Its backward is scatter_add_rows."""

from kdk import Op
from kdk_kernels.gather_rows import reference

op = Op(
    reference=reference.gather_rows,
    backward=reference.gather_rows_backward,
    backward_by="scatter_add_rows",
    backward_as=reference.as_scatter_add_rows,
    check=reference.check,
    kind="algorithmic",
    outputs=("rows",),
    shapes={"table": "R H", "index": "*N", "rows": "*N H"},
    uses={"table": ("table", "index")},
    indexes={"index": "R"},
    longest={"grad table": "N"},
    independent=("N", "H"),
    flops={"forward": lambda N, R, H: 0, "backward": lambda N, R, H: N * H},
    fills=("aten::index_select", "aten::embedding"),
    neighbours=("scatter_add_rows", "linear"),
)
