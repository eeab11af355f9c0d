"""Shapes of real models for gather_rows: N rows taken out of R, H elements each."""

from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"N": Dim(), "R": Dim(minimum=1), "H": Dim()},
    models=(
        Case("ogbn-products, one hop", {"N": 262144, "R": 2449029, "H": 100}),
        Case("ogbn-arxiv, one hop", {"N": 65536, "R": 169343, "H": 128}),
        Case("llama-3-8b embedding", {"N": 4096, "R": 128256, "H": 4096}),
        Case("qwen3-30b-a3b, tokens to experts", {"N": 32768, "R": 4096, "H": 2048}),
    ),
)
