"""linear_cross_entropy: what is particular to it. The checks that hold for every operator run elsewhere."""

import importlib
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kdk
import kdk.ops
from kdk.backends import LANGUAGES
from kdk.errors import InputError
from kdk_kernels.linear_cross_entropy import algorithm, algorithm_backward, patterns
from kdk_kernels.linear_cross_entropy.reference import linear_cross_entropy, linear_cross_entropy_backward

KERNELS = ("torch", "triton", "pallas", "nki")
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", KERNELS)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def problem(N: int, H: int, V: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, target with some rows ignored, bias; logits of a few units."""
    target = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(3))
    target[::4] = -100
    return randn(N, H, dtype=dtype), randn(V, H, seed=1, dtype=dtype) / math.sqrt(H) * 2, target, randn(V, seed=2, dtype=dtype)


def formula(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **kw: Any) -> Tensor:
    """The definition, by torch's own loss."""
    z = F.linear(x, weight, bias)
    softcap, z_loss, reduction = kw.pop("softcap", None), kw.pop("z_loss", 0.0), kw.pop("reduction", "mean")
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    loss = F.cross_entropy(z, target, reduction="none", **kw)
    kept = target != kw.get("ignore_index", -100)
    loss = loss + torch.where(kept, z_loss * z.logsumexp(-1).square(), 0.0)
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.sum() / kept.sum()


def gradients(function: Callable[..., Tensor], x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **kw: Any) -> list[Tensor]:
    """The loss and the gradients of x, weight and bias."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    loss = function(leaves[0], leaves[1], target, leaves[2] if bias is not None else None, **kw)
    weights = randn(*loss.shape, seed=9, dtype=loss.dtype) if loss.dim() else torch.tensor(3.0, dtype=loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, weights)]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"label_smoothing": 1.0, "reduction": "sum"},
        {"softcap": 2.0},
        {"z_loss": 1e-2},
        {"ignore_index": 5, "label_smoothing": 0.2, "softcap": 30.0, "z_loss": 1e-3, "reduction": "none"},
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", ["reference", "torch"])
def test_it_is_cross_entropy_of_linear(implementation: str, arguments: dict[str, Any]) -> None:
    x, weight, target, bias = problem(37, 19, 53, torch.float64)
    target = target.clamp(min=0) if "ignore_index" in arguments else target
    with kdk.use(implementation):
        got = gradients(kdk.ops.linear_cross_entropy, x, weight, target, bias, **arguments)
    for g, w in zip(got, gradients(formula, x, weight, target, bias, **arguments), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("spelling", "arguments"), patterns.SPELLINGS, ids=[s.__name__ for s, _ in patterns.SPELLINGS])
def test_spellings_are_the_operator(spelling: Callable[..., Tensor], arguments: dict[str, Any]) -> None:
    x, weight, target, _ = problem(23, 8, 31)
    target = target.clamp(min=0)  # none ignored: some spellings know no such row
    torch.testing.assert_close(kdk.ops.linear_cross_entropy(x, weight, target, **arguments), spelling(x, weight, target))


def test_transformers_models() -> None:
    """The loss of whole models, from their last hidden state, softcap included."""
    transformers = pytest.importorskip("transformers")
    small = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0,
    }  # fmt: skip
    for name, softcap in (("Llama", None), ("Gemma2", 30.0)):
        config = getattr(transformers, f"{name}Config")(**small)
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        ids = torch.randint(1, 61, (2, 9))
        labels = ids.clone()
        labels[:, 3:5] = -100
        expected = model(input_ids=ids, labels=labels).loss
        hidden = model.model(input_ids=ids).last_hidden_state
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        torch.testing.assert_close(kdk.ops.linear_cross_entropy(hidden, model.lm_head.weight, shifted, softcap=softcap), expected)


SMALLER = {
    "torch": {"algorithm": {"LEAST": 1 << 14}},
    "triton": {"triton": {"TILES": 4}, "triton_backward": {"LEAST": 1 << 16}},
    "pallas": {
        "pallas": {"MOST_ROWS": 256, "MOST_COLUMNS": 256, "MOST_TILE": 128},
        "pallas_backward": {"MOST_STAYING": 128, "MOST_STREAMING": 128},
    },
    "nki": {"nki": {"PART": 256}, "nki_backward": {"PART": 256}},
}
"""Blocks and parts as small as they may be: many of them in a problem that the simulators finish soon."""


@IMPLEMENTATIONS
def test_many_tiles_and_parts(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows and columns than a block of any kernel, none of which they divide; all scalars at once."""
    if implementation in LANGUAGES:
        launch = LANGUAGES[implementation].module("launch")
        if launch.missing("cpu"):
            pytest.skip(launch.missing("cpu"))
        launch.prepare()
    for file, values in SMALLER[implementation].items():
        module = importlib.import_module(f"kdk_kernels.linear_cross_entropy.{file}")
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    x, weight, target, bias = problem(531, 17, 331)
    arguments = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3, "reduction": "none"}
    with kdk.use(implementation), kdk.strict():
        got = gradients(kdk.ops.linear_cross_entropy, x, weight, target, bias, **arguments)
    want = gradients(formula, *(t.double() if t.is_floating_point() else t for t in (x, weight, target, bias)), **arguments)
    for g, w in zip(got, want, strict=True):
        error = (g.double() - w).abs().max() / w.abs().max()
        assert error < 3e-6, error


@IMPLEMENTATIONS
def test_banned_columns_and_rows_that_are_nothing(implementation: str) -> None:
    """A bias of -inf bans a class, whole blocks of them too; ignored rows have no gradient, whatever is in them."""
    x, weight, target, bias = problem(20, 8, 300)
    bias[:260] = -math.inf
    bias[290] = -math.inf
    target[target >= 0] = 270
    target[1] = 3  # banned: the loss is infinite
    x[4] = math.nan  # ignored
    x[8] = math.inf  # ignored
    with kdk.use(implementation), kdk.strict():
        leaf = x.clone().requires_grad_()
        loss = kdk.ops.linear_cross_entropy(leaf, weight, target, bias, reduction="none")
    want = F.cross_entropy(F.linear(x, weight, bias), target, reduction="none")
    torch.testing.assert_close(loss.detach(), want)
    assert loss[1] == math.inf
    with kdk.use(implementation), kdk.strict():
        (dx,) = torch.autograd.grad(loss[torch.isfinite(want)].sum(), leaf)
    assert not dx[target == -100].any()
    assert torch.isfinite(dx).all() and dx[2].any()


@IMPLEMENTATIONS
def test_all_ignored(implementation: str) -> None:
    """The value is F.cross_entropy's, NaN for a mean; every gradient is 0."""
    x, weight, _, bias = problem(6, 5, 32)
    target = torch.full((6,), -100)
    for reduction in ("mean", "sum"):
        with kdk.use(implementation), kdk.strict():
            loss, *grads = gradients(kdk.ops.linear_cross_entropy, x, weight, target, bias, reduction=reduction)
        torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, weight, bias), target, reduction=reduction), equal_nan=True)
        assert all(not g.any() and torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("implementation", ["reference", "torch"])
def test_no_rows(implementation: str) -> None:
    x, weight, target = randn(0, 4), randn(7, 4), torch.zeros(0, dtype=torch.long)
    with kdk.use(implementation):
        loss, dx, dweight = gradients(kdk.ops.linear_cross_entropy, x, weight, target, None)
    assert loss.isnan() and dx.shape == (0, 4) and dweight.shape == (7, 4) and not dweight.any()


@IMPLEMENTATIONS
def test_a_target_that_is_no_class_gives_nan(implementation: str) -> None:
    x, weight, target, _ = problem(8, 5, 32)
    target[1], target[2] = 32, -1
    with kdk.use(implementation):
        loss = kdk.ops.linear_cross_entropy(x, weight, target, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, False, False, False, False, False]


def test_only_what_is_needed_is_computed() -> None:
    x, weight, target, bias = problem(8, 5, 32)
    lse = linear_cross_entropy(x, weight, target, bias)[1]
    for needs, missing in (("x", (1, 2)), ("weight", (0, 2)), ("bias", (0, 1)), ("x,bias", (1,))):
        arguments = torch.ones(8), x, weight, target, bias, lse, -100, 0.0, None, 0.0, needs
        got = linear_cross_entropy_backward(*arguments)
        assert all((g is None) == (i in missing) for i, g in enumerate(got))
    frozen = weight.clone()
    leaf = x.clone().requires_grad_()
    kdk.ops.linear_cross_entropy(leaf, frozen, target, bias).backward()
    assert leaf.grad is not None and frozen.grad is None
    assert kdk.ops.linear_cross_entropy(x, weight, target, bias).item() > 0  # nothing needs a gradient


def test_inputs_that_autograd_saved_stay_as_they_are() -> None:
    """x is the output of a softmax, which its own backward reads."""
    p, (_, weight, target, _) = randn(8, 5).requires_grad_(), problem(8, 5, 32)
    kdk.ops.linear_cross_entropy(p.softmax(-1), weight, target).backward()
    got, p.grad = p.grad, None
    F.cross_entropy(p.softmax(-1) @ weight.t(), target).backward()
    torch.testing.assert_close(got, p.grad)


def test_autocast_casts_the_product_and_not_the_loss() -> None:
    x, weight, target, bias = problem(16, 8, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, *grads = gradients(kdk.ops.linear_cross_entropy, x, weight, target, bias)
    assert loss.dtype == torch.float32 and all(g.dtype == torch.float32 for g in grads)
    rounded = [t.bfloat16().float() for t in (x, weight, bias)]
    torch.testing.assert_close(loss, formula(rounded[0], rounded[1], target, rounded[2]))
    leaf = rounded[0].clone().requires_grad_()
    loss = kdk.ops.linear_cross_entropy(leaf, rounded[1], target)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # a backward inside of it: nothing is cast any more
        (got,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(got, gradients(formula, rounded[0], rounded[1], target, None)[1] / 3)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_autocast_in_a_graph(implementation: str) -> None:
    """The reference is part of the graph there."""
    x, weight, target, bias = problem(16, 8, 64)

    @torch.compile(fullgraph=True, backend="eager")
    def step() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return kdk.ops.linear_cross_entropy(x, weight, target, bias)

    rounded = [t.bfloat16().float() for t in (x, weight, bias)]
    with kdk.use(implementation):
        torch.testing.assert_close(step(), formula(rounded[0], rounded[1], target, rounded[2]))


def test_meta_tensors() -> None:
    x, weight, target = (t.to("meta") for t in problem(16, 8, 64)[:3])
    assert kdk.ops.linear_cross_entropy(x, weight, target).shape == ()


def test_compiles_into_one_graph() -> None:
    x, weight, target, bias = problem(16, 8, 64)

    def step(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor) -> Tensor:
        return kdk.ops.linear_cross_entropy(x, weight, target, bias, softcap=30.0, label_smoothing=0.1)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for g, w in zip(gradients(compiled, x, weight, target, bias), gradients(step, x, weight, target, bias), strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"reduction": "max"}, "LCE-REDUCTION"),
        ({"target": torch.zeros(3, dtype=torch.long)}, "LCE-TARGET"),
        ({"weight": torch.zeros(9, 4)}, "LCE-WEIGHT"),
        ({"bias": torch.zeros(8)}, "LCE-BIAS"),
        ({"label_smoothing": 1.5}, "LCE-SMOOTHING"),
        ({"softcap": 0.0}, "LCE-SOFTCAP"),
        ({"z_loss": -1.0}, "LCE-Z-LOSS"),
        ({"ignore_index": 2**40}, "LCE-IGNORE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_does_not_take(change: dict[str, Any], code: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(4, 5), "weight": torch.zeros(9, 5), "target": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(InputError, match=code):
        kdk.ops.linear_cross_entropy(**{**arguments, **change})


class Peak(TorchDispatchMode):
    """The most bytes of storages that were made inside and lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()
        self.others: set[int] = set()  # made outside: a view of one is no memory

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.others |= set(given) - self.seen
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                self._count(t.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen or key in self.others:
            return
        self.seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def peak_of(N: int, H: int, V: int, device: str = "cpu", **scalars: Any) -> int:
    """Bytes above inputs, outputs and gradients, forward and backward, of the plain-torch implementation's own functions: the mode
    sees an operator as one call. device: "meta" makes the same tensors without numbers."""
    x, weight = (torch.zeros(size, H, device=device) for size in (N, V))
    target = torch.zeros(N, dtype=torch.long, device=device)
    usual = {"ignore_index": -100, "label_smoothing": 0.0, "softcap": None, "z_loss": 0.0} | scalars
    with Peak() as peak:
        loss, lse = algorithm.forward(x, weight, target, None, *usual.values())  # type: ignore[arg-type]
        gradients = algorithm_backward.backward(loss, x, weight, target, None, lse, *usual.values(), "x,weight")  # type: ignore[arg-type]
    return peak.most - sum(t.numel() * 4 for t in (loss, lse, *gradients) if t is not None)


def test_the_count_sees_the_logits() -> None:
    """The tracking mode is no blind eye: torch's own way stores them."""
    x, weight, target, _ = problem(64, 8, 512)
    with Peak() as peak:
        F.cross_entropy(x @ weight.t(), target)
    assert peak.most >= 64 * 512 * 4


def test_the_count_leaves_views_of_what_was_there() -> None:
    x = torch.zeros(64, 8)
    with Peak() as peak:
        x[3:].t()
        assert peak.most == 0
        x[:2] + 1
    assert peak.most == 2 * 8 * 4


def test_memory_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm, "LEAST", 1)
    assert peak_of(256, 4, 8192) <= 256 * 8192 * 4 / 8


@pytest.mark.parametrize("scalars", [{}, {"softcap": 30.0, "label_smoothing": 0.1, "z_loss": 1e-4}], ids=["plain", "all"])
def test_memory_of_a_real_vocabulary(scalars: dict[str, Any]) -> None:
    N, H, V = 8192, 512, 128256
    peak = peak_of(N, H, V, "meta", **scalars)
    assert N * V * 4 / algorithm.PARTS < peak <= N * V * 4 / 16
