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

NORMS = {
    "llama": 5, "mistral_window": 5, "qwen3": 9, "qwen3_moe": 9, "mixtral": 5, "deepseek_v3": 9, "gemma2": 9, "gemma3": 13, "gpt_oss": 5,
    "phi3": 5, "glm": 5, "mamba": 3, "mamba2": 5, "qwen3_next": 8, "t5": 12,
}  # fmt: skip
GLUS = {"llama": 2, "mistral_window": 2, "qwen3": 2, "phi3": 2, "glm": 2, "cohere": 2}
ROPES = (
    "deepseek_v3",
    "llama",
    "mistral_window",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "phi3",
    "glm",
    "gpt_neox",
    "gptj",
    "cohere",
)
ROUTERS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next")
HEADS = ("llama", "mistral_window", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "phi3", "glm", "gpt2", "mamba", "mamba2")
SCANS = {"mamba": 2, "recurrent": 1}
WITHOUT = ("gpt2", "bert", "whisper", "clip", "dinov2", "convnext", "swin", "resnet", "gat", "graph_sage", "dlrm", "sampler", "rwkv")


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
    norms = chains.get("rms_norm", []) + chains.get("add_rms_norm", [])
    if name in NORMS:
        listed = [path for path, cls in capture.modules.items() if re.search(r"RMSNorm|T5LayerNorm", cls)]
        assert Counter(norms) == Counter(listed) and len(listed) == NORMS[name]
    if name in GLUS:
        listed = [path for path, cls in capture.modules.items() if cls.endswith("MLP")]
        assert Counter(chains["silu_and_mul"]) == Counter(listed) and len(listed) == GLUS[name]
    if name in ROPES:
        listed = [path for path, cls in capture.modules.items() if cls.endswith("Attention")]
        assert Counter(chains["rope"]) == Counter(listed)
    if name == "generate":  # four calls of the model, of two layers
        assert len(chains["rope"]) == chains["rope"].count("model.model.layers.0.self_attn") * 2 == 8
    if name in ROUTERS:
        listed = [path for path, cls in capture.modules.items() if cls.lower().endswith("topkrouter")]
        assert Counter(chains["router_topk"]) == Counter(listed)
    if name in HEADS:
        assert chains["linear_cross_entropy"] == [""]
    if name in SCANS:
        loops = {f["module"] for f in report["findings"] if f["kind"] == "loop" and f["pattern"] == "linear_recurrence"}
        assert len(loops) == SCANS[name]
    if name in ("sampler", "generate"):
        assert "sample_top_k_top_p" in chains
    if name in WITHOUT:
        assert not {"rms_norm", "add_rms_norm", "silu_and_mul", "rope"} & set(chains)
    for finding in report["findings"]:
        if finding["kind"] == "chain":
            # What a model changes in place afterwards cannot be confirmed, and the finding says so.
            assert finding["evidence"]["kind"] == "measured" or "changed in place" in finding["evidence"]["source"], finding


def test_there_are_enough_and_kdk_knows_its_operators() -> None:
    assert len(ARCHITECTURES) >= 24 and kdk.ops.rms_norm is not None
    assert all(hasattr(architectures, name) for name in (*NORMS, *GLUS, *ROPES, *ROUTERS, *HEADS, *SCANS, *WITHOUT))
