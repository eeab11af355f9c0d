"""The modelled cost: per-instruction cycles, bounds, lints, and the timeline file."""

import itertools
import json

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from tests.nki.kit import loaded, psum, sbuf, stored

from kdk.backends.nki import emulator

X = np.ones((128, 1024), np.float32)


def one(issue, target="trn2"):
    """The record of one instruction."""

    def kernel(x):
        nisa.dma_copy(x, loaded(x))
        issue(loaded(x))
        return x

    sim = emulator.simulate(kernel, target=target)
    sim(X.copy())
    return sim.trace[-1]


HALF = "bfloat16"
CYCLES = {
    "copy float32": (1024, lambda t: nisa.tensor_copy(sbuf(t.shape), t)),
    "copy bfloat16 in sbuf": (256, lambda t: nisa.tensor_copy(sbuf(t.shape, HALF), nl.full(t.shape, 1.0, HALF))),
    "copy bfloat16 strided": (256, lambda t: nisa.tensor_copy(sbuf((128, 512), HALF), nl.full(t.shape, 1.0, HALF)[:, 0:1024:2])),
    "short": (64, lambda t: nisa.tensor_copy(sbuf((128, 4)), t[:, 0:4])),
    "gpsimd starts slowly": (1174, lambda t: nisa.tensor_copy(sbuf(t.shape), t, engine=nisa.engine.gpsimd)),
    "tensor_tensor float32": (2048, lambda t: nisa.tensor_tensor(sbuf(t.shape), t, t, nl.add)),
    "tensor_tensor one in psum": (512, lambda t: nisa.tensor_tensor(sbuf((128, 512)), t[:, 0:512], filled_psum(), nl.add)),
    "activation": (1024, lambda t: nisa.activation(sbuf(t.shape), nl.exp, t)),
    "activation with sum": (1088, lambda t: nisa.activation_reduce(sbuf(t.shape), nl.exp, t, nl.add, sbuf((128, 1)))),
    "reciprocal": (8192, lambda t: nisa.reciprocal(sbuf(t.shape), t)),
    "bn_aggr": (64, lambda t: nisa.bn_aggr(sbuf((128, 2)), t[:, 0:12])),
    "reduce float32": (1024, lambda t: nisa.tensor_reduce(sbuf((128, 1)), nl.add, t, axis=1)),
    "reduce bfloat16": (512, lambda t: nisa.tensor_reduce(sbuf((128, 1), HALF), nl.add, half(t.shape), axis=1)),
    "reduce bfloat16 into float32": (1024, lambda t: nisa.tensor_reduce(sbuf((128, 1)), nl.add, half(t.shape), axis=1)),
    "tensor_tensor bfloat16": (1024, lambda t: nisa.tensor_tensor(sbuf(t.shape, HALF), half(t.shape), half(t.shape), nl.add)),
    "scalar_tensor_tensor": (2048, lambda t: nisa.scalar_tensor_tensor(sbuf(t.shape), t, nl.add, 1.0, nl.multiply, t)),
    "scalar_tensor_tensor bfloat16": (1024, lambda t: subtract_multiply(t.shape)),
    "memset zero": (512, lambda t: nisa.memset(sbuf(t.shape, HALF), 0.0)),
    "memset": (1024, lambda t: nisa.memset(sbuf(t.shape, HALF), 1.0)),
    "predicated": (2048, lambda t: nisa.tensor_copy_predicated(t, 0.0, nl.full(t.shape, 1, nl.uint8))),
    "scan": (2048, lambda t: nisa.tensor_tensor_scan(sbuf(t.shape), t, t, 0.0, nl.add, nl.add)),
    "max8": (1024, lambda t: nisa.max8(sbuf((128, 8)), t)),
    "matmul bfloat16": (512, lambda t: matmul(HALF)),
    "matmul float32": (2048, lambda t: matmul("float32")),
    "transpose": (128, lambda t: nisa.nc_transpose(psum((128, 128)), t[:, 0:128])),
    "iota": (1174, lambda t: nisa.iota(sbuf(t.shape, "int32"), [[1, 1024]])),
}


def half(shape):
    return nl.full(shape, 1.0, HALF)


def subtract_multiply(shape):
    nisa.scalar_tensor_tensor(sbuf(shape, HALF), half(shape), nl.subtract, 1.0, nl.multiply, half(shape))


def filled_psum():
    t = psum((128, 512))
    nisa.memset(t, 0.0)
    return t


def matmul(dtype):
    nisa.nc_matmul(psum((128, 512)), nl.full((128, 128), 1.0, dtype), nl.full((128, 512), 1.0, dtype))


@pytest.mark.parametrize("name", CYCLES)
def test_cycles_of_one_instruction(name):
    cycles, issue = CYCLES[name]
    assert one(issue).cycles == cycles


def test_time_is_cycles_by_the_clock():
    vector = one(CYCLES["copy float32"][1])
    assert vector.us == pytest.approx(1024 / 0.96e3) and vector.engine == "vector"
    assert one(CYCLES["copy float32"][1], "trn3").us == pytest.approx(1024 / 1.2e3)
    product = one(CYCLES["matmul bfloat16"][1])
    assert product.us == pytest.approx(512 / 2.4e3) and product.flops == 2 * 128 * 128 * 512


def test_dma_time_is_bytes_by_bandwidth():
    record = one(lambda t: nisa.dma_copy(sbuf(t.shape), t))
    assert record.bytes == X.nbytes
    assert record.us == pytest.approx(X.nbytes / (16 * 23.0) / 1e3)
    few = one(lambda t: nisa.dma_copy(sbuf((8, 1024)), t[0:8]))  # one engine serves 8 partitions
    assert few.us == pytest.approx(8 * 4096 / 23.0 / 1e3)


def test_dma_moves_the_wider_side_and_slows_down_for_short_rows():
    cast = one(lambda t: nisa.dma_copy(sbuf(t.shape, HALF), t))
    assert cast.bytes == X.nbytes
    short = one(lambda t: nisa.dma_copy(sbuf((128, 256)), t[:, 0:256]))  # 1024 bytes per partition: half the speed
    assert short.us == pytest.approx(2 * 128 * 1024 / (16 * 23.0) / 1e3)
    tiny = one(lambda t: nisa.dma_copy(sbuf((128, 1)), t[:, 0:1]))
    assert tiny.us == pytest.approx(8 * 128 * 4 / (16 * 23.0) / 1e3)
    turned = one(lambda t: nisa.dma_transpose(sbuf((128, 128)), t[:, 0:128]))
    assert turned.us == pytest.approx(128 * 512 / (16 * 23.0) / 1e3 * 4 / 0.5)


@nki.jit
def two_engines(x):
    t, y = loaded(x), sbuf(x.shape)
    nisa.activation(y, nl.exp, t, name="exponentials")
    nisa.tensor_tensor(y, y, t, nl.add)
    return stored(y)


def test_report_bounds_and_limits():
    sim = emulator.simulate(two_engines)
    sim(X)
    report = sim.report
    assert report["evidence"] == "modelled" and report["generation"] == 3 and report["instructions"] == 4
    assert report["hbm_bytes"] == report["dma_bytes"] == 2 * X.nbytes
    assert report["engine_us"]["scalar"] == pytest.approx(1024 / 1.2e3)
    assert report["engine_us"]["vector"] == pytest.approx(2048 / 0.96e3)
    assert report["limiting"] == "dma" and report["lower_bound_us"] == max(*report["engine_us"].values(), report["hbm_us"])
    assert report["lower_bound_us"] <= report["in_order_us"] <= report["upper_bound_us"]
    assert report["sbuf_peak_bytes"] == 2 * 4096 and report["psum_peak_banks"] == 0


def test_in_order_time_waits_for_data():
    """A chain cannot overlap; two independent halves can."""

    def chain(x):
        t = loaded(x)
        for _ in range(4):
            nisa.activation(t, nl.copy, t)
            nisa.tensor_copy(t, t)
        return stored(t)

    def apart(x):
        a, b = loaded(x), loaded(x)
        for _ in range(4):
            nisa.activation(a, nl.copy, a)
            nisa.tensor_copy(b, b)
        nisa.tensor_tensor(a, a, b, nl.add)
        return stored(a)

    first, second = emulator.simulate(chain), emulator.simulate(apart)
    first(X)
    second(X)
    busy = first.report["engine_us"]["scalar"] + first.report["engine_us"]["vector"]
    assert first.report["in_order_us"] > busy
    assert second.report["in_order_us"] < second.report["upper_bound_us"] - 4 * 1024 / 1.2e3 / 2


def test_depends_on_delays():
    def kernel(x, wait):
        a, b = loaded(x), nl.zeros((128, 1024), nl.float32)
        slow = nisa.reciprocal(a, a)
        quick = nisa.activation(b, nl.exp, b)
        if wait:
            quick.depends_on(slow)
        return stored(b)

    free, held = emulator.simulate(kernel), emulator.simulate(kernel)
    free(X, False)
    held(X, True)
    assert held.report["in_order_us"] > free.report["in_order_us"] + 3


def test_lints_are_noted_once_per_line():
    def kernel(x):
        small = sbuf((128, 4))
        for _ in range(3):
            nisa.dma_copy(small, x[:, 0:4])
        out = psum((128, 128))
        a = nl.full((128, 128), 1.0, nl.float32)
        nisa.nc_matmul(out, a, a)
        return stored(out)

    sim = emulator.simulate(kernel)
    sim(X)
    lints = sim.report["lints"]
    assert any("16 bytes per partition" in text and len(sites) == 1 for text, sites in lints.items())
    assert any("float32" in text for text in lints)
    assert all(text.startswith("[C23]") for text in lints)


def test_timeline_file(tmp_path):
    sim = emulator.simulate(two_engines)
    with pytest.raises(ValueError, match="not called"):
        emulator.write_timeline(sim, tmp_path / "t.json")
    sim(X)
    emulator.write_timeline(sim, tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    assert content["otherData"] == {"evidence": "modelled"}
    spans = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in spans] == ["dma_copy", "exponentials", "tensor_tensor", "dma_copy"]
    for before, after in itertools.pairwise(spans):
        assert after["ts"] >= before["ts"] + before["dur"]
    assert {e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"} == {"dma", "scalar", "vector"}


def test_without_data_full_size_shapes_are_costed():
    """A language-model head at full size: no values, no memory for them."""

    @nki.jit
    def head(hidden, weight):
        (k, rows), vocabulary = hidden.shape, weight.shape[1]
        out = nl.ndarray((rows, vocabulary), dtype=nl.bfloat16, buffer=nl.shared_hbm)
        left = [loaded(hidden[i : i + 128, 0:128]) for i in range(0, k, 128)]
        for column in range(0, 4096, 512):
            total = psum((128, 512))
            for i in range(0, k, 128):
                nisa.nc_matmul(total, left[i // 128], loaded(weight[i : i + 128, column : column + 512]))
            line = sbuf((128, 512), nl.bfloat16)
            nisa.tensor_copy(line, total)
            nisa.dma_copy(out[0:128, column : column + 512], line)
        return out

    sim = emulator.simulate(head, data=False)
    specs = emulator.TensorSpec((4096, 8192), "bfloat16"), emulator.TensorSpec((4096, 128256), "bfloat16")
    with pytest.raises(emulator.NkiValidationError, match="never written") as caught:
        sim(*specs)
    assert caught.value.code == "C15"  # only the first 128 rows and 4096 columns were written
    assert sim.report["flops"] == 2 * 4096 * 128 * 4096
    with pytest.raises(TypeError, match="data=False"):
        emulator.simulate(head)(*specs)


def test_half_precision_arguments_cost_half():
    sims = [emulator.simulate(two_engines), emulator.simulate(two_engines)]
    sims[0](X)
    sims[1](X.astype(ml_dtypes.bfloat16))
    assert sims[1].report["hbm_bytes"] * 4 == sims[0].report["hbm_bytes"] * 3  # only the input is bfloat16
