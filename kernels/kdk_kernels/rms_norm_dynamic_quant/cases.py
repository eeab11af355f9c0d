"""Shapes of real models for rms_norm_dynamic_quant: N tokens, H hidden."""

from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"N": Dim(), "H": Dim(minimum=1)},
    scalars={"eps": (1e-5, 1e-6), "offset": (0.0, 1.0), "dtype": ("int8", "float8_e4m3fn", "float8_e5m2")},
    models=(
        Case("llama-3-8b", {"N": 4096, "H": 4096}),
        Case("llama-3-8b fp8", {"N": 4096, "H": 4096}, {"dtype": "float8_e4m3fn"}),
        Case("llama-3-8b decode", {"N": 1, "H": 4096}),
        Case("deepseek-v3", {"N": 4096, "H": 7168}, {"eps": 1e-6, "dtype": "float8_e4m3fn"}),
        Case("gemma-2-9b", {"N": 4096, "H": 3584}, {"eps": 1e-6, "offset": 1.0}),
    ),
)
