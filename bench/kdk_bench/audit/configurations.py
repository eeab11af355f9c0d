"""`kdk audit --hf config.json`: the model built small and run, and its costs at the real size on tensors without data."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kdk.errors import UsageError
from kdk_bench.audit import counting
from kdk_bench.audit.recorder import Session
from kdk_bench.audit.running import DTYPES, attempt, run, said, total
from kdk_bench.audit.trace import Capture

TOKENS = 16
LONGEST = 4096
SMALL = (
    (r"(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_decoder_layers)", 2),
    (r"(hidden_size|d_model|n_embd|dim)", 64),
    (r"(intermediate_size|ffn_dim|n_inner|d_ff|(en|de)coder_ffn_dim|(shared_expert|moe)_intermediate_size)", 128),
    (r"(num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads)", 4),
    (r"(head_dim|d_kv|v_head_dim|qk_nope_head_dim)", 16),
    (r"qk_rope_head_dim", 8),
    (r"(q|kv)_lora_rank", 32),
    (r"vocab_size", 256),
    (r"(num_experts|num_local_experts|n_routed_experts)", 8),
    (r"(num_experts_per_tok|num_selected_experts)", 2),
    (r"n_group|topk_group", 1),
    (r"first_k_dense_replace", 1),
    (r"max_position_embeddings|n_positions|n_ctx", 128),
)
"""(name in a configuration, its small value); a value that is smaller already stays."""


def shrink(real: dict[str, Any]) -> dict[str, Any]:
    """The configuration at toy width with two layers; the ratio of query to key heads stays."""
    small: dict[str, Any] = {}
    for key, value in real.items():
        limit = next((size for name, size in SMALL if re.fullmatch(name, key)), None)
        if isinstance(value, dict) and key.endswith("_config"):
            small[key] = shrink(value)
        elif limit is not None and isinstance(value, int) and not isinstance(value, bool):
            small[key] = min(value, limit)
        elif key.endswith("_token_id") and isinstance(value, int):
            small[key] = min(value, 2)
        elif key == "layer_types" and isinstance(value, list):
            small[key] = value[:2]
        else:
            small[key] = value
    if isinstance(real.get("num_key_value_heads"), int):
        small["num_key_value_heads"] = max(1, small["num_attention_heads"] * real["num_key_value_heads"] // real["num_attention_heads"])
    return small


def run_config(file: str, train: bool, dtype: str) -> Capture:
    """The capture of the small model, with that of the real size in `real` where tensors without data carry the model through."""
    try:
        real = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise UsageError("AUDIT-HF", f"{file} could not be read as JSON", value=str(error), way_out="the config.json of a model") from None
    if not isinstance(real, dict) or "model_type" not in real:
        limit = "it names its model_type"
        raise UsageError("AUDIT-HF", f"{file} is no configuration of transformers", limit=limit, way_out="the config.json of a model")
    try:
        small = build(shrink(real))
    except Exception as error:  # a library's constructor may raise anything
        way_out = "write a factory that makes it small, and audit that"
        raise UsageError("AUDIT-HF", f"{file} could not be built small", value=said(error), way_out=way_out) from None
    inputs = example(small, TOKENS, train)
    capture = run(lambda: (small, (), inputs), train, dtype).capture
    capture.how = "configuration, built small; costs at the real widths and layers, on tensors without data"
    if not capture.error:
        _at_real_size(capture, real, train, dtype)
    return capture


def build(config: dict[str, Any]) -> nn.Module:
    """The model of a configuration, with random weights."""
    import transformers

    values = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "transformers_version")}
    made = transformers.AutoConfig.for_model(config["model_type"], **values)
    name = (config.get("architectures") or [""])[0]
    cls = getattr(transformers, name, None)
    return cls(made) if cls is not None else transformers.AutoModelForCausalLM.from_config(made)  # type: ignore[no-any-return]


def example(model: nn.Module, tokens: int, train: bool) -> dict[str, torch.Tensor]:
    """Random inputs under the names that transformers' models have."""
    config: Any = model.config
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        return {"pixel_values": torch.randn(1, config.num_channels, size, size)}
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    ids = torch.randint(3, text.vocab_size, (1, tokens))
    inputs = {"input_ids": ids}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.clone()
    if train:
        inputs["labels"] = ids.clone()
    return inputs


def _at_real_size(capture: Capture, real: dict[str, Any], train: bool, dtype: str) -> None:
    tokens = min(LONGEST, int(real.get("max_position_embeddings") or real.get("n_positions") or LONGEST))
    wanted = DTYPES[dtype or str(real.get("torch_dtype") or real.get("dtype") or "float32").removeprefix("torch.")]
    session = Session("tensors without data")

    def work() -> None:
        with FakeTensorMode(allow_non_fake_inputs=True), _default(wanted):
            model = build({**real, "_attn_implementation": "sdpa"}).train(train)
            inputs = example(model, tokens, train)
            session.places.name(model)
            parameters = list(model.parameters())
            session.capture.memory["parameters"] = counting.moved(parameters)
            with session.running():
                session.begin(((), inputs), keep=False, already=parameters)
                with torch.set_grad_enabled(train):
                    output = model(**inputs)
                    if train:
                        total(output).backward()  # type: ignore[no-untyped-call]
                session.end()
            if train:
                session.capture.memory["gradients"] = session.capture.memory["parameters"]
                session.capture.memory["optimiser"] = 2 * session.capture.memory["parameters"]

    if attempt(session, work):
        capture.real = session.capture
        name = str(wanted).removeprefix("torch.")
        capture.notes.append(f"costs and memory: 1 x {tokens} tokens in {name}, AdamW's two moments where trained")
    else:
        capture.notes.append(f"costs are those of the small model: at the real size, {session.capture.error}")


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
