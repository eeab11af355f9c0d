"""The main job, on a tiny Llama: right kernels pass, and wrong ones, or operators that do not run, make it fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kdk.ops
from kdk_bench import llama
from kdk_bench.llama import Size

TINY = Size("tiny", hidden=64, heads=4, kv_heads=2, mlp=96, vocabulary=64, tokens=8)
pytest.importorskip("jax", reason="the job simulates a TPU here")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One size and, where a test does not say more, one dtype and no simulator: a second or so each."""
    monkeypatch.setattr(llama, "REAL", TINY)
    monkeypatch.setattr(llama, "TWIN", TINY)
    monkeypatch.setattr(llama, "DTYPES", (torch.float32,))
    monkeypatch.setattr(llama, "TARGETS", ())


def output(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_holds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(llama, "DTYPES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(llama, "TARGETS", ("v6e",))
    assert llama.main() == 0
    text = output(capsys)
    assert "0 failures" in text
    assert "pallas simulated: rms_norm 5+5" in text
    assert "reference inlined: rms_norm 5+0" in text


@pytest.mark.parametrize(
    ("file", "direction", "result"),
    [
        ("rms_norm.pallas", "forward", 0),
        ("rms_norm.pallas_backward", "backward", 1),
        ("silu_and_mul.pallas_backward", "backward", 0),
    ],
)
def test_a_wrong_kernel(
    file: str, direction: str, result: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One result of one kernel is off by half a percent: below a rounding in bfloat16, far above one in float32."""
    kernel = f"kdk_kernels.{file}.{direction}"
    module = pytest.importorskip(f"kdk_kernels.{file}")
    right = getattr(module, direction)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        results = right(*args, **kwargs)
        if not isinstance(results, tuple):
            return results * 1.005
        return tuple([r * 1.005 if i == result and r is not None else r for i, r in enumerate(results)])

    monkeypatch.setattr(kernel, wrong)
    monkeypatch.setattr(llama, "TARGETS", ("v6e",))
    assert llama.main() == 1
    text = output(capsys)
    assert "failed tiny, float32, v6e: " in text
    assert "failed tiny, float32, default choice" not in text


def wrong_norm(factor: float) -> Callable[..., Any]:
    right = kdk.ops.rms_norm

    def rms_norm(x: Any, weight: Any, eps: float, offset: float = 0.0) -> Any:
        return right(x, weight, eps, offset) * factor

    return rms_norm


def test_a_wrong_reference_is_not_patched_in(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kdk.ops, "rms_norm", wrong_norm(1.001))
    assert llama.main() == 1
    assert "rms_norm.forward did not run" in output(capsys)


def test_a_reference_that_is_slightly_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Too little for the trial before patching: the comparison of the two float64 models sees it."""
    monkeypatch.setattr(kdk.ops, "rms_norm", wrong_norm(1 + 5e-6))
    assert llama.main() == 1
    assert "failed tiny, float64, unpatched: logits" in output(capsys)


def test_a_kernel_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal with its reason is shown and is no failure; a simulation that runs nothing is one."""
    with kdk.record() as nothing:
        pass
    assert len(llama.kernels_ran(nothing, "v6e")) == 6
    assert len(llama.missing_calls(nothing, inlined=False)) == 6


def test_values_that_are_not_finite() -> None:
    oracle = llama.reference(llama.cast(llama.build(TINY), torch.float32, torch.float64), llama.tokens(TINY))
    broken = {**oracle.run.tensors, llama.LOGITS: torch.full_like(oracle.run.tensors[llama.LOGITS], float("nan"))}
    found = llama.errors(llama.Run(0.0, broken), oracle)
    assert found[llama.LOGITS] == (float("inf"), float("inf"))
    row = llama.Row("tiny", "float32", "", 0.0, found)
    llama.judge(row, dict.fromkeys(found, llama.Error(1e-6, 1e-6)), llama.floor(torch.float32, oracle), "unpatched")
    assert len(row.failures) == 2


def test_weights_are_rounded_and_frequencies_are_not() -> None:
    model = llama.cast(llama.build(TINY), torch.bfloat16, torch.float64)
    weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert weight.dtype == torch.float64
    assert torch.equal(weight, weight.bfloat16().double())
    assert model.get_buffer("model.rotary_emb.inv_freq").dtype == torch.float32
