"""group_norm_silu: what is particular to it. The checks that hold for every operator run elsewhere."""

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kdk
import kdk.ops
from kdk.backends import LANGUAGES
from kdk.errors import InputError
from kdk_kernels.group_norm_silu import patterns
from kdk_kernels.group_norm_silu.cases import CASES
from kdk_kernels.group_norm_silu.reference import group_norm_silu, group_norm_silu_backward

KERNELS = ("triton", "pallas", "nki")
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", KERNELS)
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def arguments(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and a gradient."""
    return randn(*shape, dtype=dtype), *(randn(shape[1], seed=s, dtype=dtype) for s in (1, 2)), randn(*shape, seed=3, dtype=dtype)


def by(implementation: str, x: Tensor, groups: int, weight: Tensor, bias: Tensor, grad: Tensor, eps: float = 1e-5) -> tuple[Tensor, ...]:
    """The result and the gradients of x, weight and bias."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    with kdk.use(implementation), kdk.strict():
        y = kdk.ops.group_norm_silu(leaves[0], groups, *leaves[1:], eps)
    return (y.detach(), *torch.autograd.grad(y, leaves, grad))


def by_torch(x: Tensor, groups: int, weight: Tensor, bias: Tensor, grad: Tensor, eps: float = 1e-5) -> tuple[Tensor, ...]:
    """The same by torch's own functions in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y = F.silu(F.group_norm(leaves[0], groups, *leaves[1:], eps))
    return (y.detach(), *torch.autograd.grad(y, leaves, grad.double()))


def close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float) -> None:
    """Within `tolerance` of the largest value of the result."""
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=0.0, atol=tolerance * float(w.abs().max()))


@pytest.mark.parametrize("spelling", [s for s, _ in patterns.SPELLINGS], ids=lambda s: s.__name__)
@pytest.mark.parametrize("shape", [(2, 12, 3, 5), (2, 6, 2, 3, 4), (3, 6, 7)], ids=["4-D", "5-D", "3-D"])
def test_spellings_equal_the_reference(spelling: Any, shape: tuple[int, ...]) -> None:
    x, weight, bias, _ = arguments(*shape, dtype=torch.float64)
    args = x * 3 + 1, 3, weight, bias, 1e-3
    torch.testing.assert_close(spelling(*args), group_norm_silu(*args)[0], rtol=1e-12, atol=1e-13)


def test_the_backward_is_the_derivative() -> None:
    x, weight, bias, grad = arguments(2, 12, 3, 5, dtype=torch.float64)
    _, mean, rstd = group_norm_silu(x, 4, weight, bias, 1e-3)
    got = group_norm_silu_backward(grad, x, weight, bias, mean, rstd, "x,weight,bias")
    for g, w in zip(got, by_torch(x, 4, weight, bias, grad, 1e-3)[1:], strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)
    assert group_norm_silu_backward(grad, x, weight, bias, mean, rstd, "bias")[:2] == (None, None)


@IMPLEMENTATIONS
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels last"])
@pytest.mark.parametrize("shape", [(2, 12, 5, 7), (1, 6, 2, 3, 5)], ids=["4-D", "5-D"])
def test_memory_formats_are_kept(implementation: str, shape: tuple[int, ...], last: bool) -> None:
    """Of y and, with a gradient of that format, of dx; and the values are those of NCHW."""
    x, weight, bias, grad = arguments(*shape)
    want = by_torch(x, 3, weight, bias, grad)
    layout = LAST[len(shape)] if last else torch.contiguous_format
    got = by(implementation, x.contiguous(memory_format=layout), 3, weight, bias, grad.contiguous(memory_format=layout))
    assert got[0].is_contiguous(memory_format=layout) and got[1].is_contiguous(memory_format=layout)
    close(got, want, 5e-6)


@IMPLEMENTATIONS
def test_a_large_mean(implementation: str) -> None:
    """E[x^2] - E[x]^2 in float32 would lose the variance altogether: at -30000 it is a sixtieth of the squared mean's last digit.

    The mean is a number of float32, with a last digit of 0.002; by a few of these the statistics may be off.
    """
    x, weight, bias, grad = arguments(2, 8, 33, 5)
    x = x + torch.tensor([4096.0, -30000.0]).reshape(2, 1, 1, 1)
    close(by(implementation, x, 2, weight, bias, grad), by_torch(x, 2, weight, bias, grad), 5e-3)
    with kdk.use(implementation), kdk.strict():
        _, mean, rstd = torch.ops.kdk.group_norm_silu(x, 2, weight, bias, 1e-5, impl=f"{implementation}!")
    groups = x.double().reshape(2, 2, -1)
    torch.testing.assert_close(mean.double(), groups.mean(-1), rtol=3e-7, atol=0.0)
    torch.testing.assert_close(rstd.double(), (groups.var(-1, unbiased=False) + 1e-5).rsqrt(), rtol=5e-4, atol=0.0)


@IMPLEMENTATIONS
@pytest.mark.parametrize("groups", [1, 3])
def test_a_group_larger_than_a_tile(implementation: str, groups: int) -> None:
    """More pixels than a tile of any kernel, with a rest, and means that differ from tile to tile."""
    x, weight, bias, grad = arguments(1, 3, 67, 131)
    x = x + torch.linspace(-20, 20, 67).reshape(1, 1, 67, 1)
    assert x[0, 0].numel() > 2 * 4096
    close(by(implementation, x, groups, weight, bias, grad), by_torch(x, groups, weight, bias, grad), 5e-6)


@pytest.mark.parametrize("longest, launches", [(1 << 18, (1, 1)), (8, (3, 3))], ids=["whole", "in tiles"])
def test_triton_launches_by_the_length_of_a_group(longest: int, launches: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's own group is one launch; a longer one is cut into tiles. Both are right, with several tiles to a group."""
    LANGUAGES["triton"].module("launch").prepare()
    module = importlib.import_module("kdk_kernels.group_norm_silu.triton")
    backward = importlib.import_module("kdk_kernels.group_norm_silu.triton_backward")
    monkeypatch.setattr(module, "WHOLE", longest)
    monkeypatch.setattr(module, "WHOLE_TILE", 32)
    monkeypatch.setattr(module, "TILE", 32)
    x, weight, bias, grad = arguments(2, 12, 5, 7)
    close(by("triton", x, 3, weight, bias, grad), by_torch(x, 3, weight, bias, grad), 5e-6)

    compile_for = LANGUAGES["triton"].module("compile").compile_for
    x, grad, statistics = torch.empty(2, 12, 35, device="meta"), torch.empty(2, 12, 35, device="meta"), torch.empty(2, 3, device="meta")
    weight = bias = torch.empty(12, device="meta")
    forward = compile_for(module.forward, (x, 3, weight, bias, 1e-5), "sm_90")
    back = compile_for(backward.backward, (grad, x, weight, bias, statistics, statistics, "x,weight,bias"), "sm_90")
    assert tuple(len(c.resources["launches"]) for c in (forward, back)) == launches


@IMPLEMENTATIONS
def test_channels_that_fill_no_tile(implementation: str) -> None:
    """21 channels in 7 groups, of 3 which no tile of sublanes divides; more rows than partitions; a last block of channels."""
    x, weight, bias, grad = arguments(7, 21, 3, 2)
    close(by(implementation, x, 7, weight, bias, grad), by_torch(x, 7, weight, bias, grad), 5e-6)


@IMPLEMENTATIONS
def test_a_group_without_variance(implementation: str) -> None:
    """Only eps is left: n is 0 there, and nothing divides by it."""
    x, weight, bias, grad = arguments(2, 4, 3, 3)
    x[0, :2] = 7.0
    got = by(implementation, x, 2, weight, bias, grad)
    close(got, by_torch(x, 2, weight, bias, grad), 5e-6)
    torch.testing.assert_close(got[0][0, :2], F.silu(bias[:2]).reshape(2, 1, 1).expand(2, 3, 3))


@pytest.mark.parametrize("implementation", ["reference", *KERNELS])
def test_large_values_saturate(implementation: str) -> None:
    """exp overflows for these; nothing of it may show, in the derivative either."""
    x, weight = torch.tensor([[[-1.0, 1.0]]]), torch.tensor([300.0])
    y, dx, dweight, dbias = by(implementation, x, 1, weight, torch.zeros(1), torch.ones(1, 1, 2), 0.0)
    assert y.tolist() == [[[0.0, 300.0]]] and dbias.tolist() == [1.0] and dweight.tolist() == [1.0]
    assert torch.isfinite(dx).all()


def test_pallas_blocks_hold_whole_groups() -> None:
    """And whole tiles, or everything; and not more than fits."""
    pytest.importorskip("jax")
    from kdk.backends.pallas.launch import prepare

    prepare()
    module = importlib.import_module("kdk_kernels.group_norm_silu.pallas")
    models = [tuple(case.sizes[letter] for letter in "CGP") for case in CASES.models]
    for C, groups, P in [*models, (21, 7, 6), (512, 1, 10**6), (2048, 2048, 1)]:
        channels, pixels = module.block_shape(C, P, groups)
        assert channels == C or channels % (C // groups) == channels % module.SUBLANES == 0
        assert pixels == P or pixels % module.LANES == 0
        assert channels * pixels <= module.ELEMENTS or pixels <= module.LANES


def test_errors() -> None:
    x, weight, bias, _ = arguments(2, 12, 3, 5)
    for args, what in (
        ((x, 5, weight, bias, 1e-5), r"groups: got 5.*a divisor of C = 12"),
        ((x, 0, weight, bias, 1e-5), "groups: got 0"),
        ((x, 4, weight[:4], bias, 1e-5), r"shape of weight.*\(12,\)"),
        ((x, 4, weight, bias[None], 1e-5), r"shape of bias.*\(12,\)"),
        ((x, 4, weight, bias, -1e-5), "eps"),
        ((x[0, :, 0, 0], 4, weight, bias, 1e-5), "shape of x"),
    ):
        with pytest.raises(InputError, match=what):
            kdk.ops.group_norm_silu(*args)


def test_the_audit_looks_for_it() -> None:
    """Its spellings are traced with `groups`, which is the size of a letter, and fit tensors of 3, 4 and 5 dimensions."""
    from kdk_bench.audit import chains

    chain = next(c for c in chains.chains() if c.name == "group_norm_silu")
    pattern = chains._trace(chain, patterns.functional, {}, False)
    assert pattern is not None and set(pattern.marks.values()) == {"groups", "eps"}
    assert set(pattern.places.values()) == {"x", "weight", "bias"}
    for shape in ((2, 12, 30), (2, 12, 5, 6), (2, 12, 2, 3, 5)):
        assert chains.unify("N C *P", shape, {"C": 12}) == {"C": 12, "N": 2, "P": 30}
    assert chains.unify("N C *P", (12,), {}) is None and chains.unify("N C *P", (2, 8, 3), {"C": 12}) is None


# ---- diffusers --------------------------------------------------------------------------------------------------------


def autoencoder() -> nn.Module:
    """A small one of Stable Diffusion's kind, with weights that are all random."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    model: nn.Module = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, block_out_channels=(8, 16),
        layers_per_block=1, norm_num_groups=4,
    )  # fmt: skip
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def test_patch_of_an_autoencoder() -> None:
    """Every residual block runs on the operator, with the same loss and gradients; and back, bit for bit."""
    model, x = autoencoder().double(), randn(1, 3, 16, 16, dtype=torch.float64)

    def run() -> list[Tensor]:
        model.zero_grad()
        y = model(x).sample
        y.square().mean().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    before = run()
    report = kdk.patch(model)
    assert {(row.cls, row.operators) for row in report.replaced} == {("ResnetBlock2D", ("group_norm_silu",))}
    assert len(report.replaced) == sum(type(m).__name__ == "ResnetBlock2D" for m in model.modules()) == 10
    with kdk.record() as ran:
        after = run()
    assert "group_norm_silu.backward" in str(ran)
    largest = max(float(b.abs().max()) for b in before)  # of a bias in front of a norm the gradient is 0, but for roundings
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-12 * largest)
    kdk.unpatch(model)
    assert all(torch.equal(a, b) for a, b in zip(run(), before))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, ""),
        ({"temb_channels": None, "out_channels": 16}, ""),
        ({"skip_time_act": True}, ""),
        ({"time_embedding_norm": "scale_shift"}, "time_embedding_norm"),
        ({"non_linearity": "gelu"}, "its activation is GELU"),
        ({"down": True}, "changes the size"),
    ],
)
def test_patch_of_a_residual_block(settings: dict[str, Any], reason: str) -> None:
    from diffusers.models.resnet import ResnetBlock2D

    block = ResnetBlock2D(**{"in_channels": 8, "temb_channels": 6, "groups": 4, **settings})
    temb = None if block.time_emb_proj is None else randn(2, 6)
    want = block(randn(2, 8, 6, 4), temb)
    report = kdk.patch(block)
    assert (reason in report.left[0].reason) if reason else report.replaced[0].operators == ("group_norm_silu",)
    torch.testing.assert_close(block(randn(2, 8, 6, 4), temb), want, rtol=1e-5, atol=1e-5)


def test_patch_leaves_a_block_with_hooks_on_its_norm() -> None:
    from diffusers.models.resnet import ResnetBlock2D

    block = ResnetBlock2D(in_channels=8, temb_channels=None, groups=4)
    block.norm2.register_forward_hook(lambda *args: None)
    assert "hooks on norm2" in kdk.patch(block).left[0].reason
