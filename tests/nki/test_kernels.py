"""Whole kernels, written as for the vendor's toolchain, against NumPy."""

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import torch

from kdk.backends.nki import emulator

RANDOM = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return RANDOM.standard_normal(shape, np.float32).astype(dtype)


def loaded(src):
    tile = nl.ndarray(src.shape, dtype=src.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=src)
    return tile


@nki.jit
def rms_norm(x, weight, eps):
    rows, hidden = x.shape
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    scale = nl.ndarray((128, hidden), dtype=weight.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=scale, src=weight.ap([[0, 128], [1, hidden]]))
    for first in range(0, rows, 128):
        n = min(128, rows - first)
        tile = loaded(x[first : first + n])
        squares = nl.ndarray((n, hidden), dtype=nl.float32, buffer=nl.sbuf)
        total = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(
            dst=squares,
            op=nl.square,
            data=tile,
            reduce_op=nl.add,
            reduce_res=total,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        nisa.activation(dst=total, op=nl.rsqrt, data=total, scale=1.0 / hidden, bias=eps)
        y = nl.ndarray((n, hidden), dtype=x.dtype, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(dst=y, data=tile, op0=nl.multiply, operand0=total, op1=nl.multiply, operand1=scale[0:n])
        nisa.dma_copy(dst=out[first : first + n], src=y)
    return out


@nki.jit
def matmul(at, b):
    """at.T @ b for at (K, M), b (K, N)."""
    (k, m), n = at.shape, b.shape[1]
    out = nl.ndarray((m, n), dtype=at.dtype, buffer=nl.shared_hbm)
    right = [loaded(b[i : i + 128]) for i in range(0, k, 128)]
    for row in range(0, m, 128):
        left = [loaded(at[i : i + 128, row : row + 128]) for i in range(0, k, 128)]
        line = nl.ndarray((128, n), dtype=at.dtype, buffer=nl.sbuf)
        for column in range(0, n, 512):
            total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
            for i, (a, v) in enumerate(zip(left, right)):
                nisa.nc_matmul(dst=total, stationary=a, moving=v[:, column : column + 512], accumulate=i > 0)
            nisa.tensor_copy(dst=line[:, column : column + 512], src=total, engine=nisa.engine.scalar)
        nisa.dma_copy(dst=out[row : row + 128], src=line)
    return out


def rms_norm_reference(x, weight, eps):
    x64 = x.astype(np.float64)
    return x64 / np.sqrt((x64 * x64).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


def assert_rounded_once(got, want, slack):
    """Half a unit in the last place of bfloat16 is at most 2**-8 of the value; `slack` is what float32 arithmetic adds."""
    assert (np.abs(got.astype(np.float64) - want) <= np.abs(want) * (2**-8 + 1e-6) + slack).all()


@pytest.mark.parametrize("rows", [1, 128, 200])
def test_rms_norm_float32(rows):
    x, weight = normal(rows, 384), normal(384)
    got = nki.simulate(rms_norm)(x, weight, 1e-6)
    np.testing.assert_allclose(got, rms_norm_reference(x, weight, 1e-6), rtol=2e-6, atol=1e-6)


def test_rms_norm_bfloat16_rounds_once():
    x, weight = normal(128, 256, dtype=ml_dtypes.bfloat16), normal(256, dtype=ml_dtypes.bfloat16)
    got = nki.simulate(rms_norm)(x, weight, 1e-6)
    assert got.dtype == ml_dtypes.bfloat16
    want = rms_norm_reference(x, weight, 1e-6)
    assert_rounded_once(got, want, 1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torch_arguments_come_back_as_torch(dtype):
    x, weight = torch.randn(130, 64).to(dtype), torch.randn(64).to(dtype)
    before = x.clone()
    got = nki.simulate(rms_norm)(x, weight, 1e-6)
    assert isinstance(got, torch.Tensor) and got.dtype == dtype
    want = torch.nn.functional.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(x, before)


def test_matmul_accumulates_in_psum():
    a, b = normal(384, 128, dtype=ml_dtypes.bfloat16), normal(384, 512, dtype=ml_dtypes.bfloat16)
    sim = emulator.simulate(matmul, target="trn2")
    got = sim(a, b)
    want = a.astype(np.float64).T @ b.astype(np.float64)
    assert_rounded_once(got, want, 1e-5)
    assert sim.report["psum_peak_banks"] == 1
    assert [r.op for r in sim.trace].count("nc_matmul") == 3


def test_inputs_are_mutated_in_place_and_returned_as_themselves():
    def add_one(x):
        tile = nl.load(x)
        nisa.tensor_scalar(tile, tile, nl.add, 1.0)
        nl.store(x, tile)
        return x

    x = np.zeros((4, 8), np.float32)
    assert nki.simulate(add_one)(x) is x
    assert (x == 1).all()
    strided = np.zeros((4, 16), np.float32)[:, ::2]
    nki.simulate(add_one)(strided)
    assert (strided == 1).all()
    y = torch.zeros(8, 4, dtype=torch.bfloat16).T
    assert nki.simulate(add_one)(y) is y
    assert (y == 1).all()


def test_kernel_needs_a_simulator(monkeypatch):
    monkeypatch.delenv("NKI_SIMULATOR", raising=False)
    with pytest.raises(RuntimeError, match="simulate"):
        rms_norm(normal(1, 8), normal(8), 1e-6)
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    assert rms_norm(normal(1, 8), normal(8), 1e-6).shape == (1, 8)


def test_data_false_finds_the_same_cost_without_values():
    x, weight = normal(256, 512), normal(512)
    full = emulator.simulate(rms_norm)
    full(x, weight, 1e-6)
    traced = emulator.simulate(rms_norm, data=False)
    spec = traced(emulator.TensorSpec((256, 512), "float32"), torch.empty(512, device="meta"), 1e-6)
    assert spec == emulator.TensorSpec((256, 512), "float32")
    assert traced.report == full.report
    assert traced.report["evidence"] == "modelled"


def test_two_threads_simulate_at_the_same_time():
    import threading

    results = {}

    def work(seed, target):
        x, weight = np.random.default_rng(seed).standard_normal((256, 256), np.float32), normal(256)
        sim = emulator.simulate(rms_norm, target=target)
        results[seed] = np.abs(sim(x, weight, 1e-6) - rms_norm_reference(x, weight, 1e-6)).max(), sim.report["generation"]

    threads = [threading.Thread(target=work, args=(i, ("trn2", "trn3")[i % 2])) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert {i: g for i, (_, g) in results.items()} == {0: 3, 1: 4, 2: 3, 3: 4}
    assert max(e for e, _ in results.values()) < 1e-5
