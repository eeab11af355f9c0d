"""Two cores: shared memory, barriers, exchange, races, and control flow that differs."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from tests.nki.kit import loaded, refused, sbuf

from kdk.backends.nki import emulator

X = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)


def pair(kernel, *arrays, **settings):
    return emulator.simulate(nki.jit(kernel)[2], **settings)(*arrays)


def shared(shape):
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.shared_hbm)


def half(t):
    return t[nl.ds(128 * nl.program_id(0), 128)]


def other_half(t):
    return t[nl.ds(128 * (1 - nl.program_id(0)), 128)]


def test_each_core_writes_its_half():
    def kernel(x):
        assert nl.num_programs() == 2 and nl.program_ndim() == 1
        out, t = shared(x.shape), loaded(half(x))
        nisa.tensor_scalar(t, t, nl.multiply, 2.0)
        nisa.dma_copy(half(out), t)
        return out

    np.testing.assert_array_equal(pair(kernel, X), 2 * X)


def test_one_core_without_a_grid():
    def kernel(x):
        assert nl.num_programs() == 1 and nl.program_id() == 0 and nl.program_ndim() == 0
        return x

    def write(x):
        nl.store(x[0:128], nl.load(x[0:128]))
        return kernel(x)

    emulator.simulate(write)(X.copy())


def exchange_through_memory(x, barrier):
    middle, out = shared(x.shape), shared(x.shape)
    nisa.dma_copy(half(middle), loaded(half(x)))
    if barrier:
        nisa.core_barrier(middle, (0, 1))
    nisa.dma_copy(half(out), loaded(other_half(middle)))
    return out


def test_a_barrier_orders_the_cores():
    want = np.concatenate([X[128:], X[:128]])
    np.testing.assert_array_equal(pair(exchange_through_memory, X, True), want)


def test_reading_what_the_other_core_writes_without_a_barrier():
    with refused("C21", match="touched since the last core_barrier"):
        pair(exchange_through_memory, X, False)


def test_both_cores_writing_the_same_elements():
    def kernel(x):
        out = shared((128, 64))
        nisa.dma_copy(out, loaded(half(x)))
        return out

    with refused("C21", match="writes elements"):
        pair(kernel, X)


def test_a_barrier_on_another_tensor_does_not_help():
    def kernel(x):
        middle, other = shared(x.shape), shared((1, 1))
        nisa.dma_copy(half(middle), loaded(half(x)))
        nisa.core_barrier(other, (0, 1))
        nisa.dma_copy(half(x), loaded(other_half(middle)))
        return x

    with refused("C21"):
        pair(kernel, X.copy())


@pytest.mark.parametrize("how", [nisa.dma_engine.dma, nisa.dma_engine.gpsimd_dma])
def test_sendrecv_swaps_tiles(how):
    def kernel(x):
        out, mine = shared(x.shape), loaded(half(x))
        theirs, other = sbuf((128, 64)), 1 - nl.program_id(0)
        for _ in range(3):
            nisa.sendrecv(src=mine, dst=theirs, send_to_rank=other, recv_from_rank=other, pipe_id=0, dma_engine=how)
            mine, theirs = theirs, mine
        nisa.dma_copy(half(out), mine)
        return out

    np.testing.assert_array_equal(pair(kernel, X), np.concatenate([X[128:], X[:128]]))


def test_gpsimd_dma_has_a_size_limit():
    def kernel(x):
        other = 1 - nl.program_id(0)
        t = nl.zeros((128, 257), nl.float32)
        nisa.sendrecv(t, t, other, other, 0, dma_engine=nisa.dma_engine.gpsimd_dma)

    with refused("C11", match="limit 1024"):
        pair(kernel, X)


def test_core_that_does_not_come_to_the_barrier():
    def kernel(x):
        if nl.program_id(0) == 0:
            nisa.core_barrier(x, (0, 1))

    with refused("C21", match="ended without reaching"):
        pair(kernel, X)


def test_cores_at_different_points():
    def kernel(x):
        other = 1 - nl.program_id(0)
        t = loaded(half(x))
        nisa.sendrecv(t, t, other, other, pipe_id=other)

    with refused("C21", match="one core is at"):
        pair(kernel, X)


def test_dynamic_loops_must_agree():
    def kernel(x):
        nl.fori_loop(0, 1 + nl.program_id(0), lambda i: None)
        nisa.dma_copy(half(x), loaded(half(x)))
        return x

    with refused("C21", match="dynamic loops"):
        pair(kernel, X.copy())


def test_static_differences_are_legal_and_noted():
    def kernel(x):
        t = loaded(half(x))
        if nl.program_id(0) == 0:
            nisa.tensor_scalar(t, t, nl.add, 1.0)
        nisa.dma_copy(half(x), t)
        return x

    sim = emulator.simulate(nki.jit(kernel)[2])
    x = X.copy()
    sim(x)
    np.testing.assert_array_equal(x, np.concatenate([X[:128] + 1, X[128:]]))
    assert any("not the same ones" in text for text in sim.report["lints"])


def test_shared_tensors_pair_up_by_order_and_must_agree():
    def kernel(x):
        shared((4 + nl.program_id(0), 4))

    with refused("C21", match="shared_hbm tensor 0"):
        pair(kernel, X)


def test_errors_of_one_core_come_through():
    def kernel(x):
        if nl.program_id(0) == 1:
            raise ValueError("core 1 failed")
        nisa.core_barrier(x, (0, 1))

    with pytest.raises((ValueError, emulator.NkiValidationError)) as caught:
        pair(kernel, X)
    assert "core 1 failed" in str(caught.value)


def test_two_cores_need_gen3():
    with refused("C12"):
        pair(lambda x: x, X, target="trn1")


def test_the_environment_fixes_the_number_of_cores(monkeypatch):
    def kernel(x):
        nisa.dma_copy(half(x), loaded(half(x)))
        return x

    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    emulator.simulate(kernel)(X.copy())
    with refused("C21", match="NEURON_LOGICAL_NC_CONFIG=1"):
        pair(kernel, X.copy())


def test_report_counts_the_slower_core():
    def kernel(x):
        t = loaded(half(x))
        nisa.dma_copy(half(x), t)
        return x

    sim = emulator.simulate(nki.jit(kernel)[2])
    sim(X.copy())
    assert sim.report["cores"] == 2 and sim.report["instructions"] == 4
    single = emulator.simulate(nki.jit(kernel))
    single(X.copy())
    assert sim.report["lower_bound_us"] == single.report["lower_bound_us"]
