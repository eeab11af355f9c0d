"""Shapes of real models for router_topk: N tokens, E experts, K of them for each token."""

from typing import Any

from kdk.cases import Case, Cases, Dim


def valid(sizes: dict[str, int], scalars: dict[str, Any]) -> bool:
    """Groups divide the experts, at least two to a group, and the best groups hold enough of them.

    No router has so many experts, or takes so many, as are left out: 512 and 22 are the most that are known.
    """
    if sizes["E"] > 1040 or sizes["K"] > 64:
        return False
    if scalars["renormalize"] and sizes["K"] == 1:  # a weight of 1, and a gradient of rounding errors alone, which have no scale
        return False
    groups, top_groups, experts = scalars["groups"], scalars["top_groups"], sizes["E"]
    if groups is None or top_groups is None:
        return groups is top_groups
    in_group, rest = divmod(experts, groups)
    return rest == 0 and in_group >= 2 and top_groups <= groups and sizes["K"] <= top_groups * in_group


RENORMALIZED = {"renormalize": True}
DEEPSEEK = {**RENORMALIZED, "scoring": "sigmoid", "groups": 8, "top_groups": 4, "scale": 2.5}

CASES = Cases(
    valid=valid,
    dims={"N": Dim(), "K": Dim(minimum=1, at_most="E"), "E": Dim(minimum=1, at_least=8)},
    scalars={
        "scoring": ("softmax", "sigmoid"),
        "groups": (None, 4, 8, 2),
        "top_groups": (None, 2, 3, 1),
        "renormalize": (False, True),  # first the one whose sum is not constant, so that its gradient says something
        "scale": (1.0, 2.5),
    },
    models=(
        Case("qwen3-30b-a3b", {"N": 4096, "K": 8, "E": 128}, RENORMALIZED),
        Case("qwen3-30b-a3b decode", {"N": 1, "K": 8, "E": 128}, RENORMALIZED),
        Case("mixtral-8x7b", {"N": 4096, "K": 2, "E": 8}, RENORMALIZED),
        Case("deepseek-v3", {"N": 4096, "K": 8, "E": 256}, DEEPSEEK),
        Case("deepseek-v3 decode", {"N": 32, "K": 8, "E": 256}, DEEPSEEK),
        Case("kimi-k2", {"N": 4096, "K": 8, "E": 384}, {**RENORMALIZED, "scoring": "sigmoid", "scale": 2.827}),
        Case("glm-4.5-air", {"N": 4096, "K": 8, "E": 128}, {**RENORMALIZED, "scoring": "sigmoid"}),
        Case("gpt-oss-120b", {"N": 4096, "K": 4, "E": 128}, RENORMALIZED),
        Case("qwen3-next-80b", {"N": 4096, "K": 10, "E": 512}, RENORMALIZED),
        Case("qwen1.5-moe", {"N": 4096, "K": 4, "E": 60}),
        Case("olmoe", {"N": 4096, "K": 8, "E": 64}),
        Case("llama-4-maverick", {"N": 4096, "K": 1, "E": 128}, {"scoring": "sigmoid"}),
    ),
)
