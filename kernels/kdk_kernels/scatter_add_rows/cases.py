"""Shapes of real models for scatter_add_rows: N rows added up in R, H elements each."""

from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"N": Dim(), "R": Dim(minimum=1), "H": Dim()},
    scalars={"deterministic": (False, True)},
    models=(
        Case("ogbn-products, one hop", {"N": 262144, "R": 65536, "H": 100}),
        Case("ogbn-arxiv, one hop", {"N": 65536, "R": 16384, "H": 128}),
        Case("llama-3-8b embedding, its gradient", {"N": 4096, "R": 128256, "H": 4096}, {"deterministic": True}),
        Case("qwen3-30b-a3b, experts to tokens", {"N": 32768, "R": 4096, "H": 2048}),
    ),
)
