"""Shapes of real models for rope: B sequences, S tokens, Hq and Hk heads, R of D elements rotate."""

from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={
        "S": Dim(),
        "B": Dim(optional=True),
        "Hq": Dim(),
        "Hk": Dim(),
        "R": Dim(multiple=2, at_most="D"),
        "D": Dim(minimum=2),
    },
    scalars={"interleaved": (False, True)},
    models=(
        Case("llama-3-8b", {"S": 4096, "B": 1, "Hq": 32, "Hk": 8, "R": 128, "D": 128}),
        Case("llama-3-8b, batch of 64 decoding", {"S": 1, "B": 64, "Hq": 32, "Hk": 8, "R": 128, "D": 128}),
        Case("qwen3-30b-a3b", {"S": 4096, "B": 1, "Hq": 32, "Hk": 4, "R": 128, "D": 128}),
        Case("phi-2", {"S": 2048, "B": 1, "Hq": 32, "Hk": 32, "R": 32, "D": 80}),
        Case("gpt-neox-20b", {"S": 2048, "B": 1, "Hq": 64, "Hk": 64, "R": 24, "D": 96}),
        Case("gpt-j-6b", {"S": 2048, "B": 1, "Hq": 16, "Hk": 16, "R": 64, "D": 256}, {"interleaved": True}),
        Case("glm-4-9b", {"S": 4096, "B": 1, "Hq": 32, "Hk": 2, "R": 64, "D": 128}, {"interleaved": True}),
    ),
)
