"""sample_top_k_top_p: a token per row, drawn from logits cut by temperature, top-k, top-p and min-p."""

from kdk import Op
from kdk.compare import Choice
from kdk_kernels.sample_top_k_top_p import comparison, public, reference

op = Op(
    reference=reference.sample_top_k_top_p,
    check=reference.check,
    public=public.sample_top_k_top_p,
    kind="algorithmic",
    outputs=("token", "logprob"),
    shapes={
        "logits": "N V",
        "uniform": "N",
        "k": "N",
        "p": "N",
        "min_p": "N",
        "temperature": "N",
        "token": "N",
        "logprob": "N",
    },
    longest={"token": "V", "logprob": "V"},
    independent=("N",),
    mixed={"uniform": "float32", "p": "float32", "min_p": "float32", "temperature": "float32"},
    indexes={"k": "V"},
    ranges={"uniform": (0.0, 1.0), "p": (0.0, 1.0), "min_p": (0.0, 1 + 2**-23), "temperature": (0.0, 2.0)},
    choice=Choice(outputs=("token",), valid=comparison.valid, given=comparison.given),
    flops={"forward": lambda N, V: 12 * N * V},
)
