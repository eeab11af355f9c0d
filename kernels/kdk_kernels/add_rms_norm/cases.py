"""Shapes of real models for add_rms_norm: N tokens, H hidden."""

from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"N": Dim(), "H": Dim(minimum=1)},
    scalars={"eps": (1e-5, 1e-6), "offset": (0.0, 1.0)},
    models=(
        Case("llama-3-8b", {"N": 4096, "H": 4096}),
        Case("llama-3-8b decode", {"N": 1, "H": 4096}),
        Case("qwen3-30b-a3b", {"N": 4096, "H": 2048}, {"eps": 1e-6}),
        Case("gemma-2b", {"N": 4096, "H": 2048}, {"eps": 1e-6, "offset": 1.0}),
        Case("deepseek-v3", {"N": 4096, "H": 7168}, {"eps": 1e-6}),
        Case("llama-3-405b", {"N": 2048, "H": 16384}),
    ),
)
