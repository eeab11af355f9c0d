"""router_topk: the experts of a mixture of experts, and their weights, from a router's logits."""

from kdk import Op
from kdk.compare import Choice
from kdk_kernels.router_topk import choice, reference

op = Op(
    reference=reference.router_topk,
    backward=reference.router_topk_backward,
    check=reference.check,
    kind="algorithmic",
    outputs=("weights", "indices"),
    shapes={"logits": "*N E", "bias": "E", "weights": "*N K", "indices": "*N K"},
    uses={"logits": ("logits", "indices")},
    longest={"weights": "E", "indices": "E", "grad logits": "E"},
    independent=("N",),
    flops={"forward": lambda N, E, K: N * (4 * E + 5 * K), "backward": lambda N, E, K: N * (10 * E + 2 * K)},
    mixed={"bias": "float32"},
    sized={"K": "k"},
    choice=Choice(outputs=("indices",), valid=choice.valid, given=choice.given),
)
