"""Every instruction in a simulation without data: the same trace and cost, and the same checks of what is initialised."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from tests.nki.kit import NUMPY, loaded, psum, refused, sbuf, stored

from kdk.backends.nki import emulator

X = np.abs(np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32)) + 0.5
CMD = nisa.reduce_cmd


def tile(shape=(128, 128), dtype="float32", value=1):
    return nl.full(shape, value, dtype)


def indices(dtype="uint32"):
    return nl.full((128, 1), 3, dtype)


ISSUES = {
    "tensor_copy": lambda t, x: nisa.tensor_copy(out(), t),
    "memset": lambda t, x: nisa.memset(out(), 1.0),
    "predicated": lambda t, x: nisa.tensor_copy_predicated(tile(), t, tile(dtype="uint8")),
    "predicated number": lambda t, x: nisa.tensor_copy_predicated(tile(), 2.0, tile(dtype="uint8")),
    "tensor_tensor": lambda t, x: nisa.tensor_tensor(out(), t, t, nl.add),
    "tensor_scalar": lambda t, x: nisa.tensor_scalar(out(), t, nl.add, 1.0, op1=nl.multiply, operand1=t[:, 0:1]),
    "bits": lambda t, x: nisa.tensor_scalar(out("int32"), tile(dtype="int32"), nl.bitwise_and, 3),
    "scalar_tensor_tensor": lambda t, x: nisa.scalar_tensor_tensor(out(), t, nl.add, 1.0, nl.add, t),
    "reciprocal": lambda t, x: nisa.reciprocal(out(), t),
    "activation": lambda t, x: nisa.activation(out(), nl.log, t, bias=t[:, 0:1], scale=2.0),
    "activation_reduce": lambda t, x: nisa.activation_reduce(out(), nl.exp, t, nl.add, out(n=1)),
    "activate2": lambda t, x: nisa.activate2(out(), nl.prelu, t, 1.0, 2.0, nl.multiply, nl.add, relu_param=0.1),
    "tensor_reduce": lambda t, x: nisa.tensor_reduce(out(n=1), nl.maximum, t, axis=1, negate=True),
    "reduce bits": lambda t, x: nisa.tensor_reduce(out("int32", 1), nl.bitwise_or, tile(dtype="int32"), axis=1),
    "tensor_scalar_reduce": lambda t, x: nisa.tensor_scalar_reduce(out(), t, nl.add, 1.0, nl.add, out(n=1)),
    "load_reduce": lambda t, x: nisa.tensor_scalar_reduce(
        out(), t, nl.add, 1.0, nl.add, out(n=1), reduce_cmd=CMD.load_reduce, reduce_init=t[:, 0:1]
    ),
    "cumulative": lambda t, x: nisa.tensor_scalar_cumulative(out(), t, nl.add, nl.add, 1.0),
    "scan": lambda t, x: nisa.tensor_tensor_scan(out(), t, t, 0.0, nl.multiply, nl.add),
    "bn": lambda t, x: (nisa.bn_stats(stats := sbuf((128, 6)), t), nisa.bn_aggr(out(n=2), stats)),
    "range_select": lambda t, x: nisa.range_select(out(), t, nl.less, nl.less, t[:, 0:1], t[:, 1:2], reduce_res=out(n=1)),
    "select_reduce": lambda t, x: nisa.select_reduce(out(), tile(dtype="uint8"), t, 0.0),
    "exponential": lambda t, x: nisa.exponential(out(), t, reduce_res=out(n=1), reduce_cmd=CMD.reset_reduce),
    "max8": lambda t, x: (nisa.max8(best := sbuf((128, 8)), t), nisa.nc_find_index8(out("uint32", 8), t, best)),
    "replace8": lambda t, x: nisa.nc_match_replace8(out(), t, t[:, 0:8], 0.0, out("uint32", 8)),
    "shuffle": lambda t, x: nisa.nc_stream_shuffle(out(), t, list(range(32))),
    "iota": lambda t, x: nisa.iota(out("int32"), [[1, 128]]),
    "affine_select": lambda t, x: nisa.affine_select(out(), [[1, 128]], 1, t, 0.0, nl.less),
    "partition_reduce": lambda t, x: nisa.tensor_partition_reduce(kept(sbuf((1, 128))), nl.add, t),
    "n_gather": lambda t, x: nisa.nc_n_gather(out(n=1), t, indices()),
    "local_gather": lambda t, x: nisa.local_gather(out(n=16), t, indices("uint16")),
    "nonzero": lambda t, x: nisa.nonzero_with_count(kept(tile((128, 129), "int32")), t),
    "topk": lambda t, x: nisa.topk(out("bfloat16", 8), out("uint32", 8), tile(dtype="bfloat16"), 100),
    "sequence_bounds": lambda t, x: nisa.sequence_bounds(kept(sbuf((1, 2, 128))), t[0:1]),
    "rng": lambda t, x: (nisa.rng(out("uint32")), nisa.dropout(out(), t, 0.5), nisa.rand2(out(), 0.0, 1.0)),
    "random state": lambda t, x: (
        nisa.set_rng_seed(tile((1, 1), "int32")),
        nisa.rand_set_state(tile((128, 6), "uint32")),
        nisa.rand_get_state(out("uint32", 6)),
    ),
    "matmul": lambda t, x: (nisa.nc_matmul(p := psum((128, 128)), t, t), nisa.nc_matmul(p, t, t), kept(p)),
    "nc_transpose": lambda t, x: nisa.nc_transpose(kept(psum((128, 128))), t),
    "is_transpose": lambda t, x: nisa.nc_matmul(kept(psum((128, 128))), t, nl.shared_identity_matrix(128, "float32"), is_transpose=True),
    "quantize": lambda t, x: matmul_mx(),
    "indirect": lambda t, x: nisa.tensor_copy(out(n=16), t.indirect(indices("int32"), 16)),
    "scatter": lambda t, x: nisa.tensor_copy(kept(tile()).indirect(indices("int32"), 16), t[:, 0:16]),
    "dma_transpose": lambda t, x: nisa.dma_transpose(out(), x),
    "dma_compute": lambda t, x: nisa.dma_compute(out(), [t, x], nl.add),
    "gather": lambda t, x: nisa.dma_copy(out(), x.vector_select(0, indices())),
    "scalar offset": lambda t, x: nisa.dma_copy(out(n=1), x.select(1, indices("int32")[0:1])),
    "gather transpose": lambda t, x: nisa.dma_transpose(out("bfloat16"), x.view("bfloat16")[:, 0:128].vector_select(0, indices())),
    "language": lambda t, x: kept(nl.softmax(nl.where(nl.greater(t, 1.0), nl.sin(t), nl.floor(t)))),
}
KEPT: list = []


def kept(t):
    KEPT.append(t)
    return t


def out(dtype="float32", n=128):
    return kept(sbuf((128, n), dtype))


def matmul_mx():
    source, data, scale = tile(dtype="bfloat16"), sbuf((128, 32), "float8_e4m3fn_x4"), tile((128, 32), "uint8", 0)
    nisa.quantize_mx(data, source, scale)
    nisa.nc_matmul_mx(kept(psum((32, 32))), data, data, scale, scale)


@pytest.mark.parametrize("name", ISSUES)
def test_the_same_trace_and_outputs_that_count_as_written(name):
    def kernel(x):
        KEPT.clear()
        ISSUES[name](loaded(x), x)
        return tuple(stored(t) for t in KEPT)

    full, traced = emulator.simulate(kernel, target="trn3"), emulator.simulate(kernel, target="trn3", data=False)
    results = full(X)
    specs = traced(X)
    assert [(tuple(r.shape), r.dtype) for r in results] == [(s.shape, np.dtype(NUMPY[s.dtype])) for s in specs]
    # the place of a line is part of a record; everything else must agree
    assert [r._replace(site="") for r in traced.trace] == [r._replace(site="") for r in full.trace]
    assert traced.report == full.report


def test_what_is_not_initialised_is_still_found():
    def kernel(x, rows):
        t, result = sbuf((128, 128)), nl.ndarray((rows, 128), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(t[0:96], x[0:96])
        nisa.activation(t, nl.exp, t)
        nisa.dma_copy(result, t[0:rows])
        return result

    emulator.simulate(kernel, data=False)(X, 96)
    with refused("C16", match="may not be used"):
        emulator.simulate(kernel, data=False)(X, 128)


def test_a_choice_by_value_is_taken_to_pick_usable_elements():
    """A mask hides what was not written; without data its values are unknown, those of affine_select are known."""

    def kernel(x, multiplier):
        t, low, high = sbuf((128, 128)), tile((128, 1), value=0), tile((128, 1), value=64)
        nisa.dma_copy(t[:, 0:64], x[:, 0:64])
        nisa.range_select(out(), t, nl.greater_equal, nl.less, low, high)
        nisa.affine_select(out(), [[-1, 128]], multiplier, t, 0.0, nl.greater, offset=64)
        return tuple(stored(v) for v in KEPT[-2:])

    for data in (True, False):
        emulator.simulate(kernel, data=data)(X, 0)
        with refused("C16"):
            emulator.simulate(kernel, data=data)(X, 1)


def test_accumulation_is_still_checked():
    def kernel(x):
        t = loaded(x)
        nisa.nc_matmul(psum((128, 128)), t, t, accumulate=True)

    with refused("C9"):
        emulator.simulate(kernel, data=False)(X)
