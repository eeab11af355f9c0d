"""Shapes of real models for silu_and_mul: N tokens, H width of the feed-forward layer."""

from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"N": Dim(), "H": Dim()},
    models=(
        Case("llama-3-8b", {"N": 4096, "H": 14336}),
        Case("llama-3-8b decode", {"N": 1, "H": 14336}),
        Case("llama-2-7b", {"N": 4096, "H": 11008}),
        Case("mistral-7b, batch of 32 decoding", {"N": 32, "H": 14336}),
        Case("gemma-2b width", {"N": 4096, "H": 16384}),
        Case("llama-3-70b", {"N": 2048, "H": 28672}),
        Case("qwen3-30b-a3b expert", {"N": 2048, "H": 768}),
        Case("deepseek-v3 expert", {"N": 2048, "H": 2048}),
    ),
)
