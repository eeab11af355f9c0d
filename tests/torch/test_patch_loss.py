"""kdk.patch on language models in training: the loss is linear_cross_entropy, and the logits are made only if somebody uses them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kdk
from kdk.errors import UsageError
from kdk_kernels.linear_cross_entropy.patterns_logits import Logits

V = 89  # no other size of these models
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": V,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma2": {"final_logit_softcapping": 3.0},
    "Mixtral": {"output_router_logits": True, "num_local_experts": 4},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
}
TOKENS = torch.randint(3, V, (2, 8), generator=torch.Generator().manual_seed(0))
LABELS = TOKENS.masked_fill(torch.arange(8) % 4 == 3, -100)


def build(family: str = "Llama", **settings: Any) -> nn.Module:
    """A small model in training mode, with weights that are all random."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **settings})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


@pytest.fixture(autouse=True)
def dynamo_forgets() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Made(TorchDispatchMode):
    """Whether a tensor as large as the logits of TOKENS was made."""

    found = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.found |= any(isinstance(t, Tensor) and t.shape[-1:] == (V,) and t.numel() >= TOKENS.numel() * V for t in tree_leaves(result))
        return result


def step(model: nn.Module, **arguments: Any) -> tuple[Any, dict[str, Tensor]]:
    model.zero_grad()
    out = model(TOKENS, **{"labels": LABELS, **arguments})
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(after: tuple[Any, dict[str, Tensor]], before: tuple[Any, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(after[0].loss, before[0].loss, rtol=1e-6, atol=0)
    assert after[1].keys() == before[1].keys()
    for name, grad in before[1].items():
        torch.testing.assert_close(after[1][name], grad, rtol=0, atol=2e-5 * grad.abs().max().item(), msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    """Loss and all gradients, and what a batch of a gradient accumulation divides by; one call, and logits only if used."""
    model = build(family)
    for arguments in ({}, {"num_items_in_batch": torch.tensor(7)}):
        before = step(model, **arguments)
        row = next(row for row in kdk.patch(model).rows if not row.path)
        assert row.operators == ("linear_cross_entropy",) and "logits are made if used" in row.note
        with kdk.record() as ran:
            after = step(model, **arguments)
        assert ran.calls("linear_cross_entropy") == ran.calls("linear_cross_entropy", "backward") == 1
        assert_same(after, before)
        torch.testing.assert_close(after[0].logits.tensor(), before[0].logits, rtol=0, atol=1e-5)
        kdk.unpatch(model)


def test_logits_are_not_made() -> None:
    model = build()
    with Made() as plain:
        step(model)
    kdk.patch(model)
    with Made() as patched, kdk.use(linear_cross_entropy="torch"):
        out, _ = step(model)
        assert out.logits.shape == (2, 8, V) and out.logits.dtype == torch.float32 and out.logits.device == TOKENS.device
    assert plain.found and not patched.found
    with Made() as used:
        out.logits.argmax(-1)
    assert used.found


def test_evaluation_and_generation_are_as_before() -> None:
    model = build().eval()
    loss, logits = (model(TOKENS, labels=LABELS)[name] for name in ("loss", "logits"))
    kdk.patch(model)
    after = model(TOKENS, labels=LABELS)
    assert isinstance(after.logits, Tensor)
    torch.testing.assert_close(after.logits, logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(after.loss, loss)
    assert isinstance(model.train()(TOKENS).logits, Tensor)  # in training, but nobody asked for a loss


USES: dict[str, Callable[[Any], Any]] = {
    "function": lambda z: torch.softmax(z, -1),
    "method": lambda z: z.argmax(-1),
    "index": lambda z: z[:, :-1].contiguous(),
    "operators": lambda z: 1 - z * z + (z > 0),
    "scaled": lambda z: torch.tanh(z / 2.0) * 3,
    "cast": lambda z: z.to(torch.bfloat16).float().view(-1, V),
    "another loss": lambda z: F.cross_entropy(z.view(-1, V), TOKENS.view(-1), weight=torch.arange(V) / V),
    "probabilities": lambda z: F.cross_entropy(z.view(-1, V), torch.full((16, V), 1 / V)),
    "channels second": lambda z: F.cross_entropy(z.transpose(1, 2), TOKENS),
    "smoothed": lambda z: F.cross_entropy(3 * z.reshape(-1, V), LABELS.view(-1), label_smoothing=0.1, reduction="sum"),
    "joined": lambda z: torch.cat([z, z]),
    "property": lambda z: z.requires_grad,
}


@pytest.mark.parametrize("use", USES)
def test_logits_in_training_are_used_like_a_tensor(use: str) -> None:
    model = build()
    expected = USES[use](model(TOKENS, labels=LABELS).logits)
    kdk.patch(model)
    logits = model(TOKENS, labels=LABELS).logits
    assert isinstance(logits, Logits)
    got = USES[use](logits)
    got = got.tensor() if isinstance(got, Logits) else got  # a scale, a softcap or a cast is only noted
    if isinstance(expected, Tensor):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    else:
        assert got == expected


def test_logits_have_a_gradient_of_their_own() -> None:
    model = build()

    def gradient() -> Tensor:
        model.zero_grad()
        out = model(TOKENS, labels=LABELS)
        (out.loss + out.logits.logsumexp(-1).square().mean()).backward()
        return model.lm_head.weight.grad

    expected = gradient()
    kdk.patch(model)
    torch.testing.assert_close(gradient(), expected, rtol=1e-4, atol=1e-6)


def test_logits_of_weights_that_changed_are_refused() -> None:
    model = build()
    kdk.patch(model)
    early, late = model(TOKENS, labels=LABELS), model(TOKENS, labels=LABELS)
    values = early.logits.argmax(-1)
    late.loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert torch.equal(early.logits.argmax(-1), values)  # made before
    assert late.logits.shape == (2, 8, V)
    with pytest.raises(UsageError, match=r"changed since.*use them before optimizer\.step"):
        late.logits.argmax(-1)


def test_autocast() -> None:
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        before = model(TOKENS, labels=LABELS)
        kdk.patch(model)
        after = model(TOKENS, labels=LABELS)
    assert after.loss.dtype == before.loss.dtype == torch.float32
    assert after.logits.dtype == before.logits.dtype == after.logits.tensor().dtype == torch.bfloat16
    torch.testing.assert_close(after.loss, before.loss, rtol=0.01, atol=0)


def test_compiled_it_makes_the_logits_and_says_so() -> None:
    model = build()
    before = model(TOKENS, labels=LABELS)
    kdk.patch(model)
    with kdk.record() as ran:
        after = torch.compile(model, backend="eager", fullgraph=True)(TOKENS, labels=LABELS)
    assert isinstance(after.logits, Tensor)
    torch.testing.assert_close(after.loss, before.loss)
    assert ran.calls("linear_cross_entropy", how="inlined") == 1 and "makes its logits" in str(ran)


def test_hooks_on_the_head_that_come_later_are_called() -> None:
    model, seen = build(), []
    kdk.patch(model)
    handle = model.lm_head.register_forward_hook(lambda module, args, result: seen.append(result))
    with kdk.record() as ran:
        logits = model(TOKENS, labels=LABELS).logits
    assert seen[0] is logits and "hooks on its lm_head" in str(ran)
    handle.remove()
    assert isinstance(model(TOKENS, labels=LABELS).logits, Logits) and len(seen) == 1


def test_copies_and_tuples() -> None:
    """A copy trains its own weights; return_dict=False and positional labels."""
    model = build()
    before = model(TOKENS, None, None, None, None, LABELS, return_dict=False)
    kdk.patch(model)
    other = copy.deepcopy(model)
    with kdk.record() as ran:
        loss, logits = other(TOKENS, None, None, None, None, LABELS, return_dict=False)[:2]
    assert ran.calls("linear_cross_entropy") == 1 and isinstance(logits, Logits)
    torch.testing.assert_close(loss, before[0])
    loss.backward()
    assert other.lm_head.weight.grad is not None and model.lm_head.weight.grad is None


class Lora(nn.Linear):
    pass


def test_what_is_left() -> None:
    def reason(change: Callable[[Any], None]) -> str:
        model = build()
        change(model)
        row = next(row for row in kdk.patch(model).rows if not row.path)
        assert not row.operators
        return row.reason

    def another_head(model: Any) -> None:
        model.lm_head = Lora(32, V)

    def hooked(model: Any) -> None:
        model.lm_head.register_forward_hook(lambda *args: None)

    def another_loss(model: Any) -> None:
        model._loss_function = lambda logits, labels, vocab_size, **kwargs: logits.float().square().mean()

    assert "its lm_head is Lora" in reason(another_head)
    assert "hooks on its lm_head" in reason(hooked)
    assert "does not come to linear_cross_entropy" in reason(another_loss)
