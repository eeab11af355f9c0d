"""patch and unpatch: what is replaced computes the same, what is not recognised is left, and everything can be undone."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import kdk
from kdk.errors import UsageError

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = torch.randint(3, 50, (2, 8), generator=torch.Generator().manual_seed(0))
EVERYTHING = {"Attention": "rope", "MLP": "silu_and_mul", "RMSNorm": "rms_norm"}
# Model -> the ends of its classes' names, and the operators that replace them.
FAMILIES = {
    "Llama": EVERYTHING,
    "Mistral": EVERYTHING,
    "Ministral": EVERYTHING,
    "Qwen2": EVERYTHING,
    "Qwen3": EVERYTHING,
    "Phi3": EVERYTHING,
    "Granite": EVERYTHING,
    "SmolLM3": EVERYTHING,
    "Olmo2": EVERYTHING,
    "Exaone4": EVERYTHING,
    "Gemma": {"Attention": "rope", "RMSNorm": "rms_norm"},  # its MLP has GELU
    "Gemma2": {"Attention": "rope", "RMSNorm": "rms_norm"},
    "Mixtral": {"Attention": "rope", "RMSNorm": "rms_norm", "TopKRouter": "router_topk"},
    "SeedOss": {"Attention": "rope", "RMSNorm": "rms_norm"},  # dropout in its MLP
    "Cohere": {"Attention": "rope", "MLP": "silu_and_mul"},  # a LayerNorm; neighbours rotate together
    "Glm4": {"MLP": "silu_and_mul", "RMSNorm": "rms_norm"},  # another rotation
    "GPT2": {},
}

NO_LOSS = ("GPT2",)  # its body is called otherwise


def build(family: str = "Llama", **settings: Any) -> nn.Module:
    """A small model with weights that are all random, in evaluation mode."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


@pytest.fixture
def llama() -> nn.Module:
    return build()


@pytest.fixture(autouse=True)
def dynamo_forgets() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def logits(model: nn.Module) -> Tensor:
    return model(TOKENS).logits


def state(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    expected = FAMILIES[family]
    model = build(family)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        model.to(dtype)
        before = logits(model)
        report = kdk.patch(model)
        replaced = {row.cls.removeprefix(family): row.operators for row in report.replaced}
        assert replaced.pop("ForCausalLM", None) == (None if family in NO_LOSS else ("linear_cross_entropy",))
        assert replaced == {k: (v,) for k, v in expected.items()}
        with kdk.record() as ran:
            after = logits(model)
        calls = {operator: sum(row.operators == (operator,) for row in report.replaced) for operator in expected.values()}
        assert {operator: ran.calls(operator) for operator in calls} == calls
        torch.testing.assert_close(after, before, rtol=0, atol=tolerance * before.abs().max().item())
        kdk.unpatch(model)
        assert torch.equal(logits(model), before)


def test_no_module_of_the_replaced_classes_is_forgotten(llama: nn.Module) -> None:
    rows = {row.path: row for row in kdk.patch(llama).rows}
    for path, module in llama.named_modules():
        if type(module).__name__ in ("LlamaAttention", "LlamaMLP", "LlamaRMSNorm"):
            assert rows[path].operators
    assert rows["model.rotary_emb"].reason == "it makes the tables that rope reads"


@pytest.mark.parametrize("family", ["Llama", "Gemma", "Gemma2", "Gemma3Text", "Phi3"])
def test_loss_and_gradients(family: str) -> None:
    """In evaluation mode, where the loss is the model's own: test_patch_loss.py has it in training."""
    model = build(family)

    def loss_and_gradients() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    loss, before = loss_and_gradients()
    norms = [row for row in kdk.patch(model).replaced if row.operators == ("rms_norm",)]
    with kdk.record() as ran:
        patched_loss, after = loss_and_gradients()
    assert ran.calls("rms_norm", "backward") == ran.calls("rms_norm") == len(norms) > 0
    assert ran.calls("linear_cross_entropy") == 0
    torch.testing.assert_close(patched_loss, loss, rtol=1e-6, atol=0)
    assert before.keys() == after.keys()
    for name, grad in before.items():
        torch.testing.assert_close(after[name], grad, rtol=0, atol=2e-5 * grad.abs().max().item(), msg=name)


def test_undone_without_a_trace(llama: nn.Module) -> None:
    before, keys, other = state(llama), list(llama.state_dict()), build()
    kdk.patch(llama)
    assert list(llama.state_dict()) == keys
    assert not any("forward" in module.__dict__ for module in other.modules())
    report = kdk.unpatch(llama)
    assert {row.operators for row in report.replaced} == {("rope",), ("silu_and_mul",), ("rms_norm",), ("linear_cross_entropy",)}
    assert state(llama) == before
    assert "the model is not patched" in str(kdk.unpatch(llama))


def test_twice_is_once(llama: nn.Module) -> None:
    first = kdk.patch(llama)
    before = state(llama)
    assert kdk.patch(llama) == first
    assert state(llama) == before


def test_the_report_reads_well() -> None:
    text = str(kdk.patch(build("Gemma")))
    assert "patched: 8 modules, 3 left" in text
    assert "linear_cross_entropy (in training; logits are made if used)" in text
    assert "left: not silu_and_mul: its activation is GELU" in text
    assert all(len(line) < 132 for line in text.splitlines())
    assert "none of the modules" in str(kdk.patch(nn.Linear(2, 2)))


def test_random_numbers_stay(llama: nn.Module) -> None:
    before = torch.get_rng_state()
    kdk.patch(llama)
    assert torch.equal(torch.get_rng_state(), before)


def test_hooks_run(llama: nn.Module) -> None:
    kdk.patch(llama)
    layer, seen = llama.model.layers[0], []
    for module in (layer.self_attn, layer.mlp, layer.mlp.gate_proj, layer.input_layernorm, layer.self_attn.q_proj):
        module.register_forward_hook(lambda module, args, result: seen.append(module))
    logits(llama)
    assert len(seen) == 5


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_stand_on_their_own(llama: nn.Module, how: str) -> None:
    kdk.patch(llama)
    before = logits(llama)
    if how == "deepcopy":
        other = copy.deepcopy(llama)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(llama))
    else:
        file = io.BytesIO()
        torch.save(llama, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert torch.equal(logits(other), before)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    with kdk.record() as ran:
        assert not torch.equal(logits(other), before)
    assert (ran.calls("rms_norm"), ran.calls("rope"), ran.calls("silu_and_mul")) == (5, 2, 2)
    assert torch.equal(logits(llama), before)
    kdk.unpatch(other)
    assert kdk.unpatch(llama).replaced


def test_compile(llama: nn.Module) -> None:
    before = logits(llama)
    compiled = torch.compile(llama, backend="eager", fullgraph=True)
    compiled(TOKENS)
    kdk.patch(llama)
    with kdk.record() as ran:
        after = compiled(TOKENS).logits
    assert ran.calls("rms_norm", how="inlined") == 5
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    kdk.unpatch(llama)
    with kdk.record() as ran:
        compiled(TOKENS)
    assert not ran.rows


def test_generate_checkpointing_and_old_names(llama: nn.Module) -> None:
    """A cache, a recomputed forward, and a keyword that the class's decorators rename."""
    before = llama.generate(TOKENS, max_new_tokens=4, do_sample=False)
    signature = inspect.signature(llama.model.layers[0].self_attn.forward)
    kdk.patch(llama)
    assert torch.equal(llama.generate(TOKENS, max_new_tokens=4, do_sample=False), before)
    assert inspect.signature(llama.model.layers[0].self_attn.forward) == signature
    llama.train()
    llama.gradient_checkpointing_enable()
    with kdk.record() as ran:
        llama(TOKENS, labels=TOKENS).loss.backward()
    assert ran.calls("silu_and_mul") == 4  # forward, and recomputed
    x, cache = torch.randn(1, 3, 32), transformers.DynamicCache()
    attention = llama.model.layers[0].self_attn
    tables = llama.model.rotary_emb(x, torch.arange(3)[None])
    with torch.no_grad():
        attention(x, tables, None, past_key_values=cache)
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize("family", ["Llama", "Gemma", "T5"])
def test_mixed_dtypes(family: str) -> None:
    """Where the weight is float32 and x is not, a class has its own rule for the dtype of the result."""
    cls = {
        "Llama": transformers.models.llama.modeling_llama.LlamaRMSNorm,
        "Gemma": transformers.models.gemma.modeling_gemma.GemmaRMSNorm,
        "T5": transformers.models.t5.modeling_t5.T5LayerNorm,
    }[family]
    norm, x = cls(16), torch.randn(3, 16)
    for x_dtype in (torch.float32, torch.bfloat16):
        for weight_dtype in (torch.float32, torch.bfloat16):
            norm.to(weight_dtype)
            before = norm(x.to(x_dtype))
            assert kdk.patch(norm).replaced
            after = norm(x.to(x_dtype))
            kdk.unpatch(norm)
            assert after.dtype == before.dtype
            torch.testing.assert_close(after, before, rtol=0.02, atol=0.02)


def test_autocast(llama: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        before = logits(llama)
        assert kdk.patch(llama).replaced
        after = logits(llama)
    assert after.dtype == before.dtype
    torch.testing.assert_close(after, before, rtol=0, atol=0.05 * before.abs().max().item())


def test_weights_that_are_not_there_yet() -> None:
    with torch.device("meta"):
        model = build()
    assert len(kdk.patch(model).replaced) == 10
    model.to_empty(device="cpu")
    model.load_state_dict(build().state_dict(), strict=False)
    assert all(p.device.type == "cpu" for p in model.parameters())


class PlainRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class CentredRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class SquareEpsRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps**2)


class GatedRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * gate)


class SmallMLP(nn.Module):
    def __init__(self, activation: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
        self.act_fn, self.dropout = activation, nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate = self.act_fn(self.gate_proj(hidden_states))
        return self.down_proj(self.dropout(gate * self.up_proj(hidden_states)))


class ClampedMLP(SmallMLP):
    def forward(self, hidden_states: Tensor) -> Tensor:
        gate = self.act_fn(self.gate_proj(hidden_states)).clamp(max=20.0)
        return self.down_proj(gate * self.up_proj(hidden_states))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (CentredRMSNorm(), "the results differ"),
        (SquareEpsRMSNorm(), "the results differ"),
        (GatedRMSNorm(), "its forward takes x, gate"),
        (nn.LayerNorm(8), "it has a bias"),
        (nn.RMSNorm(8), "its eps is None"),
        (nn.RMSNorm((2, 8), 1e-6), "its weight is not a vector"),
        (nn.RMSNorm(8, 1e-6, elementwise_affine=False), "its weight is not a vector"),
        (SmallMLP(nn.GELU()), "its activation is GELU"),
        (SmallMLP(nn.SiLU(), dropout=0.5).eval(), "the results differ"),
        (ClampedMLP(nn.SiLU()), "the results differ"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else value,
)
def test_left(module: nn.Module, reason: str) -> None:
    report = kdk.patch(module)
    assert not report.replaced
    assert reason in report.left[0].reason
    assert "forward" not in module.__dict__


@pytest.mark.parametrize("module", [PlainRMSNorm(), nn.RMSNorm(8, 1e-6), SmallMLP(nn.SiLU())], ids=lambda m: type(m).__name__)
def test_own_classes(module: nn.Module) -> None:
    x = torch.randn(3, 8)
    before = module(x)
    assert len(kdk.patch(module).replaced) == 1
    torch.testing.assert_close(module(x), before)
    if isinstance(module, SmallMLP):
        torch.testing.assert_close(module(hidden_states=x), before)


def test_hooks_that_would_not_be_called() -> None:
    module = SmallMLP(nn.SiLU())
    module.act_fn.register_forward_hook(lambda module, args, result: None)
    assert "there are hooks on act_fn" in kdk.patch(module).left[0].reason


def test_the_forward_of_somebody_else(llama: nn.Module) -> None:
    below, above = llama.model.norm, llama.model.layers[0].mlp
    below.forward = functools.partial(type(below).forward, below)
    rows = {row.path: row for row in kdk.patch(llama).rows}
    assert rows["model.norm"].reason == "somebody else has set its forward"
    mine = above.forward
    above.forward = functools.wraps(mine)(lambda x: mine(x) * 2)
    left = kdk.unpatch(llama).left
    assert [row.path for row in left] == ["model.layers.0.mlp"]
    assert "another forward was put over kdk's" in left[0].reason


def test_what_is_no_model() -> None:
    with pytest.raises(UsageError, match="Module"):
        kdk.patch("llama")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Module"):
        kdk.unpatch(None)  # type: ignore[arg-type]
