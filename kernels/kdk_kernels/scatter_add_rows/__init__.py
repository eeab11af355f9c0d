"""scatter_add_rows: rows added up where an index says. Its backward is gather_rows."""

from kdk import Op
from kdk_kernels.scatter_add_rows import reference

op = Op(
    reference=reference.scatter_add_rows,
    backward=reference.scatter_add_rows_backward,
    backward_by="gather_rows",
    backward_as=reference.as_gather_rows,
    check=reference.check,
    kind="algorithmic",
    outputs=("table",),
    shapes={"index": "*N", "rows": "*N H", "table": "R H"},
    uses={"rows": ("index",)},
    indexes={"index": "R"},
    sized={"R": "num_rows"},
    longest={"table": "N"},
    independent=("H",),
    flops={"forward": lambda N, R, H: N * H, "backward": lambda N, R, H: 0},
    deterministic=lambda num_rows, deterministic: deterministic,
    fills=("aten::index_add", "aten::scatter_add", "aten::embedding_dense_backward"),
    neighbours=("gather_rows", "linear"),
)
