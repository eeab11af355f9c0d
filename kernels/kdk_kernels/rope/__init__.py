"""rope: rotary position embedding of queries and keys, half-split or interleaved, partial included."""

from kdk import Op
from kdk_kernels.rope import reference

op = Op(
    reference=reference.rope,
    backward=reference.rope_backward,
    check=reference.check,
    kind="elementwise",
    outputs=("q_out", "k_out"),
    shapes={
        "q": "B S Hq D",
        "k": "B S Hk D",
        "cos": "B|1 S R",
        "sin": "B|1 S R",
        "q_out": "B S Hq D",
        "k_out": "B S Hk D",
    },
    uses={"q": ("cos", "sin"), "k": ("cos", "sin")},
    independent=("B", "S", "Hq", "Hk"),
    flops={
        "forward": lambda B, S, Hq, Hk, D, R: 3 * B * S * (Hq + Hk) * R,
        "backward": lambda B, S, Hq, Hk, D, R: 3 * B * S * (Hq + Hk) * R,
    },
    mixed={"cos": "float32", "sin": "float32"},
    neighbours=("linear", "scaled_dot_product_attention"),
)
