"""Every architecture captured forward and backward, and the formulas found counted against the lists of modules."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from tests.audit import architectures
from tests.audit.architectures import ARCHITECTURES

import kdk.ops
from kdk_bench.audit import audit, support
from kdk_bench.audit.running import run

# What the lists of modules have; an architecture that is not named has none, and none may be found in it.
NORMS = {
    "llama": 5, "mistral_window": 5, "qwen3": 9, "qwen3_moe": 9, "mixtral": 5, "deepseek_v3": 9, "gemma2": 9, "gemma3": 13, "gpt_oss": 5,
    "phi3": 5, "glm": 5, "mamba": 3, "mamba2": 5, "qwen3_next": 8, "t5": 12, "generate": 5,
}  # fmt: skip
GLUS = {
    "llama": "MLP", "mistral_window": "MLP", "qwen3": "MLP", "phi3": "MLP", "glm": "MLP", "cohere": "MLP", "generate": "MLP",
    "qwen3_moe": "Experts", "mixtral": "Experts", "deepseek_v3": "(MLP|Experts)", "mamba": "Mixer", "mamba2": "NormGated",
    "qwen3_next": "(MLP|Experts|NormGated)",
}  # fmt: skip
"""Whose feed-forward blocks, experts or gated norms multiply silu(gate) by something: the end of the modules' class."""
ROPES = (
    "deepseek_v3", "llama", "mistral_window", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3", "gpt_oss", "phi3", "glm", "gpt_neox",
    "gptj", "cohere", "qwen3_next", "generate",
)  # fmt: skip
"""Half-split, interleaved (gptj, glm, cohere, deepseek_v3) and partial (gpt_neox, gptj, phi3, glm, qwen3_next)."""
ROUTERS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next")
CALLS = {"generate": 4}
"""How often the model runs within one step."""
HEADS = ("llama", "mistral_window", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "phi3", "glm", "gpt2", "mamba", "mamba2")
SCANS = {"mamba": 2 * 2 * 16, "recurrent": 2 * 12}
"""Calls of all layers' loops together: a product and a sum a turn."""


@pytest.mark.slow
@pytest.mark.parametrize("factory", ARCHITECTURES, ids=lambda f: f.__name__)
def test_captured_and_counted(factory: Any) -> None:
    torch.manual_seed(0)
    name = factory.__name__
    capture = run(factory, train=True).capture
    assert not capture.error
    assert {c.phase for c in capture.steps[0].calls} >= {"forward", "backward"}
    platforms = support.platforms(["tpu", "xla"], {}, {}, [])
    report = audit.report(capture, platforms, name)
    chains = report["capture"]["chains"]

    def listed(classes: str) -> Counter[str]:
        return Counter([path for path, cls in capture.modules.items() if re.search(classes, cls)] * CALLS.get(name, 1))

    norms = chains.get("rms_norm", []) + chains.get("add_rms_norm", [])
    assert Counter(norms) == listed("RMSNorm|T5LayerNorm") and len(norms) == NORMS.get(name, 0) * CALLS.get(name, 1)
    assert Counter(chains.get("silu_and_mul", [])) == listed(f"{GLUS[name]}$" if name in GLUS else "^$")
    assert bool(chains.get("silu_and_mul")) == (name in GLUS)
    assert Counter(chains.get("rope", [])) == listed("Attention$" if name in ROPES else "^$")
    assert bool(chains.get("rope")) == (name in ROPES)
    assert Counter(chains.get("router_topk", [])) == listed("(?i)topkrouter$")
    assert bool(chains.get("router_topk")) == (name in ROUTERS)
    if name in HEADS:
        assert chains["linear_cross_entropy"] == [""]
    if name in SCANS:
        (loop,) = (f for f in report["findings"] if f["kind"] == "loop" and f["pattern"] == "linear_recurrence" and f["platform"] == "tpu")
        assert loop["calls_per_step"] == SCANS[name]
    if name in ("sampler", "generate"):
        assert "sample_top_k_top_p" in chains
    ids = [finding["id"] for finding in report["findings"]]
    assert len(ids) == len(set(ids))
    for finding in report["findings"]:
        if finding["kind"] == "chain":
            # What a model changes in place afterwards cannot be confirmed, and the finding says so.
            assert finding["evidence"]["kind"] == "measured" or "changed in place" in finding["evidence"]["source"], finding


def test_there_are_enough_and_kdk_knows_its_operators() -> None:
    assert len(ARCHITECTURES) >= 24 and kdk.ops.rms_norm is not None
    assert all(hasattr(architectures, name) for name in (*NORMS, *GLUS, *ROPES, *ROUTERS, *HEADS, *SCANS))
