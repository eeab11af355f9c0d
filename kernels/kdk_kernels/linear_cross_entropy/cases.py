"""Shapes of real models for linear_cross_entropy: N tokens, H hidden, V vocabulary."""

from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"N": Dim(at_least=17), "H": Dim(), "V": Dim(minimum=1)},
    scalars={  # few combinations: every one is compiled
        "ignore_index": (-100, 1),
        "label_smoothing": (0.0, 0.1, 1.0),
        "softcap": (None, None, 30.0, 2.0),
        "z_loss": (0.0, 1e-2),
    },
    models=(
        Case("llama-3-8b", {"N": 8192, "H": 4096, "V": 128256}),
        Case("qwen3-8b", {"N": 8192, "H": 4096, "V": 151936}),
        Case("gemma-2-9b", {"N": 4096, "H": 3584, "V": 256000}, {"softcap": 30.0}),
        Case("gemma-3-12b", {"N": 4096, "H": 3840, "V": 262208}),
        Case("qwen3-0.6b, 512 tokens", {"N": 512, "H": 1024, "V": 151936}),  # as much as libtpu's profiler bears
        Case("gpt-2, smoothed", {"N": 8192, "H": 768, "V": 50257}, {"label_smoothing": 0.1}),
    ),
)
