"""Shapes of real models for cumsum: B sequences of T steps of D channels."""

from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"T": Dim(), "B": Dim(), "D": Dim()},
    models=(
        Case("mamba-2.8b, log decay of a chunk", {"T": 256, "B": 64, "D": 80}),
        Case("mixtral, places of tokens at 8 experts", {"T": 8192, "B": 1, "D": 8}),
        Case("qwen3-30b-a3b, places of tokens at 128 experts", {"T": 4096, "B": 1, "D": 128}),
        Case("top-p of llama-3", {"T": 128256, "B": 16, "D": 1}),
    ),
)
