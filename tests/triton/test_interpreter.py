"""Interpreting without TRITON_INTERPRET: what runs, what a launch refuses, and that nothing of it stays behind."""

import subprocess
import sys
import threading

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime import interpreter as stock  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from kdk.backends.triton.simulate import interpret, run_simulated  # noqa: E402
from kdk.errors import SimulationError, UsageError  # noqa: E402


@triton.jit
def square(x):
    return x * x


@triton.jit
def scaled_square(x, out, N, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = square(tl.load(x + at, mask=at < N, other=0.0))
    tl.store(out + at, value * scale, mask=at < N)


def run_scaled_square(x, scale=2.0, block=16):
    out = torch.empty_like(x)
    scaled_square[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), scale, BLOCK=block)
    return out


def compile_scaled_square(target=("cuda", 90, 32)):
    signature = {"x": "*fp32", "out": "*fp32", "N": "i32", "scale": "fp32", "BLOCK": "constexpr"}
    return triton.compile(ASTSource(scaled_square, signature, {"BLOCK": 16}), target=GPUTarget(*target))


def state():
    """Everything of Triton that the simulator replaces at some time."""
    owners = [
        tl,
        tl.core,
        tl.math,
        tl.tensor,
        tl.dtype,
        tl.core.tensor_descriptor_base,
        libdevice,
        stock,
        stock.InterpreterBuilder,
    ]
    owners += [JITFunction, Autotuner, ASTSource, driver]
    return [dict(vars(owner)) for owner in owners]


def test_importing_replaces_nothing():
    code = """
import triton, triton.language as tl
from triton.runtime import driver, interpreter
from triton.runtime.jit import JITFunction
owners = tl, tl.core, tl.tensor, JITFunction, interpreter, interpreter.InterpreterBuilder
was = [dict(vars(owner)) for owner in owners]
import kdk.backends.triton.simulate, kdk.backends.triton.launching, kdk.backends.triton.builder
assert was == [dict(vars(owner)) for owner in owners] and driver._active is None
print("same")
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "same\n"


def test_nothing_stays_behind():
    x = torch.randn(40)
    run_simulated(run_scaled_square, (x,), "sm_90")  # Triton's own caches fill
    globals_before, before = set(globals()), state()
    with interpret():
        run_scaled_square(x)
        assert JITFunction.run is not before[9]["run"]
    assert state() == before
    assert set(globals()) == globals_before


def test_nothing_stays_behind_after_an_exception():
    before = state()
    with pytest.raises(SimulationError), interpret():
        scaled_square[(2,)](torch.randn(40), torch.empty(20), 40, 1.0, BLOCK=32)
    assert state() == before


@pytest.mark.parametrize("first", ["interpret", "compile"])
def test_one_process_interprets_and_compiles_the_same_kernel(first, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.randn(40)
    steps = [lambda: run_simulated(run_scaled_square, (x,), "sm_90"), compile_scaled_square]
    results = [step() for step in (steps if first == "interpret" else steps[::-1])]
    out, compiled = results if first == "interpret" else results[::-1]
    torch.testing.assert_close(out, 2 * x * x)
    assert "ptx" in compiled.asm


def test_compiling_works_inside_the_context(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with interpret():
        out = run_scaled_square(torch.ones(16))
        assert "ptx" in compile_scaled_square().asm
        assert torch.equal(out, run_scaled_square(torch.ones(16)))


def test_contexts_nest():
    with interpret():
        with interpret(target="gfx942", sanitize=False):
            run_scaled_square(torch.ones(16))
        torch.testing.assert_close(run_scaled_square(torch.full((16,), 3.0)), torch.full((16,), 18.0))
    with pytest.raises(RuntimeError):
        run_scaled_square(torch.ones(16))


def test_a_thread_that_did_not_enter_is_not_interpreted():
    failures = []

    def launch():
        try:
            run_scaled_square(torch.ones(16))
        except Exception as error:
            failures.append(error)

    with interpret():
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
        run_scaled_square(torch.ones(16))
    assert len(failures) == 1 and not isinstance(failures[0], SimulationError)  # there is no GPU to launch on


def test_threads_interpret_and_compile_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    results: dict[str, object] = {}

    def interpreted(name, scale):
        x = torch.arange(64.0)
        outs = [run_simulated(run_scaled_square, (x, scale), "sm_90") for _ in range(8)]
        results[name] = all(torch.equal(out, x * x * scale) for out in outs)

    def compiled(name):
        results[name] = all("ptx" in compile_scaled_square(("cuda", arch, 32)).asm for arch in (80, 89, 90))

    threads = [threading.Thread(target=interpreted, args=(f"i{i}", float(i))) for i in (2, 3)]
    threads.append(threading.Thread(target=compiled, args=("c",)))
    before = state()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"i2": True, "i3": True, "c": True}
    assert state() == before


def test_backward_in_another_thread():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return run_simulated(run_scaled_square, (x, 1.0), "sm_90")

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return run_simulated(run_scaled_square, (x + grad, 1.0), "sm_90")

    x = torch.randn(20, requires_grad=True)
    loss = Square.apply(x).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    torch.testing.assert_close(x.grad, (x.detach() + 1) ** 2)


def test_triton_interpret_is_refused():
    code = "from kdk.backends.triton.simulate import interpret\nwith interpret(): pass"
    import os

    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert "KDK-TRITON-INTERPRET" in done.stderr


def test_unknown_target():
    with pytest.raises(UsageError, match="v6e"), interpret(target="v6e"):
        pass
