"""Shapes of real models for sample_top_k_top_p: N sequences, V tokens in the vocabulary."""

from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"N": Dim(), "V": Dim(minimum=1)},
    models=(
        Case("llama-3, 64 sequences", {"N": 64, "V": 128256}),
        Case("llama-3, one sequence", {"N": 1, "V": 128256}),
        Case("qwen3, 256 sequences", {"N": 256, "V": 151936}),
        Case("gemma-3, 16 sequences", {"N": 16, "V": 262144}),
        Case("llama-2, 16 sequences", {"N": 16, "V": 32000}),
    ),
)
