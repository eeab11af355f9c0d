"""Every check refuses, with its stable code, on trn2 and trn3 where both have it."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from tests.nki.kit import loaded, psum, refused, sbuf, simulate, stored

from kdk.backends.nki import emulator

X = np.ones((128, 128), np.float32)
G, V, S = nisa.engine.gpsimd, nisa.engine.vector, nisa.engine.scalar


def tile(shape=(128, 128), dtype="float32", value=1.0):
    return nl.full(shape, value, dtype)


def bank(shape=(128, 128), dtype="float32", value=1.0):
    t = psum(shape, dtype)
    nisa.memset(t, value)
    return t


def ints(shape=(128, 128), dtype="int32"):
    return nl.full(shape, 1, dtype)


def not_shared(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.hbm)
    nisa.dma_copy(out, x)
    return out


def matmul(stationary, moving, dst=None, **settings):
    dst = psum((stationary.shape[-1], moving.shape[-1])) if dst is None else dst
    nisa.nc_matmul(dst, stationary, moving, **settings)


def half(shape, dtype="bfloat16"):
    return tile(shape, dtype)


EVERYWHERE = {
    "C1 partitions of a tile": ("C1", lambda x: sbuf((129, 4))),
    "C1 nl.load of 256 rows": ("C1", lambda x: nl.load(x.reshape((256, 64)))),
    "C2 partitions differ": ("C2", lambda x: nisa.tensor_copy(tile(), tile((64, 128)))),
    "C2 elements differ": ("C2", lambda x: nisa.tensor_tensor(tile(), tile(), tile((128, 1)), nl.add)),
    "C2 vector operand": ("C2", lambda x: nisa.tensor_scalar(tile(), tile(), nl.add, tile((128, 2)))),
    "C2 reduce_res": ("C2", lambda x: nisa.activation_reduce(tile(), nl.exp, tile(), nl.add, tile((128, 2)))),
    "C2 iota pattern": ("C2", lambda x: nisa.iota(tile(), [[1, 4]])),
    "C3 gpsimd reads psum": ("C3", lambda x: nisa.tensor_copy(tile(), bank(), engine=G)),
    "C3 power in psum": ("C3", lambda x: nisa.tensor_tensor(tile(), tile(), bank(), nl.power)),
    "C3 matmul reads psum": ("C3", lambda x: matmul(bank(), tile())),
    "C3 matmul writes sbuf": ("C3", lambda x: matmul(tile(), tile(), sbuf((128, 128)))),
    "C3 compute reads hbm": ("C3", lambda x: nisa.tensor_copy(tile(), x)),
    "C3 activation on hbm": ("C3", lambda x: nisa.activation(x, nl.exp, tile())),
    "C3 memset on scalar": ("C3", lambda x: nisa.memset(tile(), 0.0, engine=S)),
    "C3 bits on gpsimd": ("C3", lambda x: nisa.tensor_scalar(ints(), ints(), nl.bitwise_and, 1, engine=G)),
    "C4 two inputs in psum": ("C4", lambda x: nisa.tensor_tensor(tile(), bank(), bank(), nl.add)),
    "C4 scan": ("C4", lambda x: nisa.tensor_tensor_scan(tile(), bank(), bank(), 0.0, nl.add, nl.add)),
    "C4 predicate": ("C4", lambda x: nisa.tensor_copy_predicated(tile(), bank(), bank((128, 128), "uint8", 1))),
    "C5 64 from 32": ("C5", lambda x: nisa.tensor_copy(tile((64, 128)), tile()[32:96])),
    "C5 32 from 16": ("C5", lambda x: nisa.tensor_copy(tile((32, 128)), tile()[16:48])),
    "C5 96 from 32": ("C5", lambda x: nisa.tensor_copy(tile()[32:128], tile((96, 128)))),
    "C6 five free dimensions": ("C6", lambda x: nisa.tensor_copy(tile((8, 32)), five_dimensions(tile((8, 1024))))),
    "C6 elements": ("C6", lambda x: nisa.memset(sbuf((1, 65537), "uint8"), 0)),
    "C6 stride": ("C6", lambda x: nisa.tensor_copy(tile((8, 2)), sbuf((8, 40000), "uint8")[:, 0:39999:39998])),
    "C6 partition stride": ("C6", lambda x: tile().ap([[256, 64], [1, 128]])),
    "C7 bits of floats": ("C7", lambda x: nisa.tensor_scalar(tile(), tile(), nl.bitwise_and, 1)),
    "C7 operand in bfloat16": ("C7", lambda x: nisa.tensor_scalar(tile(), tile(), nl.add, half((128, 1)))),
    "C7 scale in bfloat16": ("C7", lambda x: nisa.activation(tile(), nl.exp, tile(), scale=half((128, 1)))),
    "C7 float into int": ("C7", lambda x: nisa.memset(ints(), 1.0)),
    "C7 signed predicate": ("C7", lambda x: nisa.tensor_copy_predicated(tile(), tile(), ints())),
    "C7 predicated cast": ("C7", lambda x: nisa.tensor_copy_predicated(tile(), half((128, 128)), ints((128, 128), "uint8"))),
    "C7 transpose casts": ("C7", lambda x: nisa.nc_transpose(psum((128, 128)), half((128, 128)))),
    "C7 shuffle casts": ("C7", lambda x: nisa.nc_stream_shuffle(tile(), half((128, 128)), list(range(32)))),
    "C7 64-bit": ("C7", lambda x: sbuf((4, 4), "float64")),
    "C7 find_index8 into float": ("C7", lambda x: nisa.nc_find_index8(tile((128, 8)), tile(), tile((128, 8)))),
    "C8 mixed dtypes": ("C8", lambda x: matmul(tile(), half((128, 128)))),
    "C8 integers": ("C8", lambda x: matmul(ints(), ints())),
    "C8 wide stationary": ("C8", lambda x: matmul(half((128, 129)), half((128, 8)), psum((128, 8)))),
    "C8 tile position alone": ("C8", lambda x: matmul(half((64, 64)), half((64, 8)), tile_position=(64, 0))),
    "C8 tile position off": ("C8", lambda x: matmul(half((64, 64)), half((64, 8)), tile_position=(32, 0), tile_size=(64, 128))),
    "C8 double row without fp8": ("C8", lambda x: double_row("bfloat16")),
    "C8 transpose needs a permutation": ("C8", lambda x: matmul(tile(), tile(), is_transpose=True)),
    "C9 accumulate on nothing": ("C9", lambda x: matmul(half((128, 128)), half((128, 8)), accumulate=True)),
    "C10 first dimension": ("C10", lambda x: nisa.tensor_reduce(tile((128, 1)), nl.add, tile(), axis=0)),
    "C10 gap": ("C10", lambda x: nisa.tensor_reduce(tile((128, 4)), nl.add, tile((128, 4, 4)), axis=1)),
    "C11 bn_stats": ("C11", lambda x: nisa.bn_stats(tile((128, 6)), tile((128, 513)))),
    "C11 max8 of 4": ("C11", lambda x: nisa.max8(tile((128, 8)), tile((128, 4)))),
    "C11 transpose on vector": ("C11", lambda x: nisa.nc_transpose(tile((64, 64)), tile((64, 64)), engine=V)),
    "C11 local_gather": ("C11", lambda x: nisa.local_gather(tile(), tile(), ints((128, 2), "uint16"), num_elem_per_idx=3)),
    "C13 transpose shape": ("C13", lambda x: nisa.dma_transpose(tile((128, 64)), x)),
    "C14 slice": ("C14", lambda x: x[0:129]),
    "C14 pattern": ("C14", lambda x: x.ap([[128, 128], [1, 129]])),
    "C15 output in private hbm": ("C15", not_shared),
    "C15 nothing returned": ("C15", lambda x: None),
    "C15 unwritten": ("C15", lambda x: nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)),
    "C16 output": ("C16", lambda x: stored(sbuf((4, 4)))),
    "C17 register in Python": ("C17", lambda x: nisa.register_move(nisa.register_alloc(1), 1) or nl.fori_loop(0, 1, lambda i: 1)),
    "C18 tile": ("C18", lambda x: sbuf((1, 70000))),
    "C18 psum tile": ("C18", lambda x: psum((1, 4097))),
    "C19 divide": ("C19", lambda x: nl.divide(tile(), tile())),
    "C19 power of a number": ("C19", lambda x: nl.power(tile(), 2.0)),
    "C19 broadcasting": ("C19", lambda x: nl.add(tile(), tile((128, 1)))),
    "C19 store from psum": ("C19", lambda x: nl.store(x, bank())),
    "C19 matmul without transpose": ("C19", lambda x: nl.matmul(tile(), tile())),
    "C19 unknown operator": ("C19", lambda x: nisa.tensor_tensor(tile(), tile(), tile(), np.add)),
    "C19 scalar engine": ("C19", lambda x: nisa.tensor_scalar(tile(), tile(), nl.maximum, 0.0, engine=S)),
    "C19 mixed families": ("C19", lambda x: nisa.tensor_scalar(ints(), ints(), nl.bitwise_and, 1, op1=nl.add, operand1=1.0)),
    "C19 reduce with equal": ("C19", lambda x: nisa.tensor_reduce(tile((128, 1)), nl.equal, tile(), axis=1)),
    "C19 random_seed": ("C19", lambda x: nl.random_seed(3)),
    "C20 log of a negative number": ("C20", lambda x: stored(nl.log(tile(value=-1.0)))),
    "C21 sendrecv on one core": ("C21", lambda x: nisa.sendrecv(tile(), tile(), 0, 0, 0)),
    "C22 nothing accumulated": ("C22", lambda x: nisa.activation(tile(), nl.exp, tile(), reduce_res=tile((128, 1)))),
    "C22 reduce after idle": ("C22", lambda x: reduce_after_idle()),
    "C22 another operator": ("C22", lambda x: change_of_operator()),
    "C22 init without load": ("C22", lambda x: scalar_reduce(nl.add, reduce_init=1.0)),
    "C24 tensor_copy_dynamic_src": ("C24", lambda x: nisa.tensor_copy_dynamic_src),
    "C24 arange": ("C24", lambda x: nl.arange(4)),
    "C24 string buffer": ("C24", lambda x: nl.ndarray((4, 4), dtype=nl.float32, buffer="sbuf")),
    "C24 integer engine": ("C24", lambda x: nisa.memset(tile(), 0.0, engine=5)),
    "C24 dynamic_range": ("C24", lambda x: nl.dynamic_range(4)),
    "C25 shuffle mask": ("C25", lambda x: nisa.nc_stream_shuffle(tile(), tile(), [0] * 31)),
    "C25 operand1 without op1": ("C25", lambda x: nisa.tensor_scalar(tile(), tile(), nl.add, 1.0, operand1=2.0)),
    "C25 operand of a unary operator": ("C25", lambda x: nisa.tensor_scalar(tile(), tile(), nl.abs, 2.0)),
}
TRN2_ONLY = {
    "C8 moving of 513": ("C8", lambda x: matmul(half((128, 8)), half((128, 513)), psum((8, 513)))),
    "C8 dst crosses a bank": ("C8", lambda x: matmul(half((128, 8)), half((128, 512)), psum((8, 1024))[:, 256:768])),
    "C8 dst in bfloat16": ("C8", lambda x: matmul(half((128, 8)), half((128, 8)), psum((8, 8), "bfloat16"))),
    "C9 memset then accumulate": ("C9", lambda x: matmul(half((128, 128)), half((128, 128)), bank())),
    "C12 activate2": ("C12", lambda x: nisa.activate2(tile(), nl.exp, tile(), 1.0, 0.0, nl.multiply, nl.add)),
    "C12 exponential": ("C12", lambda x: nisa.exponential(tile(), tile())),
    "C12 rand2": ("C12", lambda x: nisa.rand2(tile(), 0.0, 1.0)),
    "C12 abs_max": ("C12", lambda x: nisa.tensor_tensor(tile(), tile(), tile(), nl.abs_max)),
    "C12 square": ("C12", lambda x: nisa.tensor_scalar(tile(), tile(), nl.square, None)),
    "C12 quantize_mx": ("C12", lambda x: nisa.quantize_mx(tile(), tile(), tile())),
    "C12 indirection": ("C12", lambda x: nisa.tensor_copy(tile((128, 16)), tile().indirect(ints((128, 1)), 16))),
    "C12 float8_e4m3fn": ("C12", lambda x: matmul(half((128, 8), "float8_e4m3fn"), half((128, 8), "float8_e4m3fn"))),
}


def five_dimensions(t):
    return t.reshape((8, 4, 4, 4, 4, 4))[:, 0:2, 0:2, 0:2, 0:2, 0:2]


def double_row(dtype):
    a = tile((128, 2, 8), dtype)
    nisa.nc_matmul(psum((8, 8)), a, a, perf_mode=nisa.matmul_perf_mode.double_row)


def scalar_reduce(op, **settings):
    nisa.tensor_scalar_reduce(tile(), tile(), nl.add, 0.0, op, **settings)


def reduce_after_idle():
    scalar_reduce(nl.maximum)
    predicate = nl.full((128, 128), 1, nl.uint8)
    nisa.select_reduce(tile(), predicate, tile(), 0.0)
    scalar_reduce(nl.maximum, reduce_cmd=nisa.reduce_cmd.reduce)


def change_of_operator():
    scalar_reduce(nl.add)
    scalar_reduce(nl.maximum, reduce_cmd=nisa.reduce_cmd.reduce)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_refused(name, target):
    code, call = EVERYWHERE[name]
    with refused(code):
        simulate(call, X, target=target)


@pytest.mark.parametrize("name", TRN2_ONLY)
def test_refused_before_gen4(name):
    code, call = TRN2_ONLY[name]
    with refused(code):
        simulate(call, X, target="trn2")


GEN2_ONLY = {
    "range_select": lambda x: nisa.range_select(tile(), tile(), nl.less, nl.less, tile((128, 1)), tile((128, 1))),
    "scalar bias": lambda x: nisa.activation(tile(), nl.exp, tile(), bias=1.0),
    "nonzero_with_count": lambda x: nisa.nonzero_with_count(ints((128, 129)), tile()),
    "tensor_copy on ScalarE": lambda x: nisa.tensor_copy(tile(), tile(), engine=S),
}


@pytest.mark.parametrize("name", GEN2_ONLY)
def test_refused_on_gen2_only(name):
    def kernel(x):
        GEN2_ONLY[name](x)
        return stored(tile())

    with refused("C12"):
        simulate(kernel, X, target="trn1")
    assert (simulate(kernel, X, target="trn2") == 1).all()


def test_limits_of_patterns_are_inclusive():
    def kernel(x):
        t = nl.full((1, 65536), 1, nl.uint8)
        nisa.tensor_copy(t[:, 0:2], t[:, 0:32768:32767])
        return stored(t[:, 0:2])

    assert (simulate(kernel, X) == 1).all()


def test_every_code_is_covered():
    named = {code for code, _ in [*EVERYWHERE.values(), *TRN2_ONLY.values()]}
    elsewhere = {"C23", "C26"}  # lints and the parser front end: test_cost.py, test_parser.py
    assert named | elsewhere == {rule.code for rule in emulator.CHECKS.values()}


def test_a_refusal_names_the_kernel_line_and_the_way_out():
    with refused("C5", match=r"tensor_copy: src covers 64 partitions from 32\. Way out: .*\. At test_checks.py:\d+$"):
        simulate(EVERYWHERE["C5 64 from 32"][1], X)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: nisa.no_such_instruction(x),
        lambda x: nl.no_such_function(x),
        lambda x: nisa.tensor_copy(tile(), tile(), mask=None),
        lambda x: nisa.dma_copy(tile(), x, dst_rmw_op=nl.add),
        lambda x: nisa.tensor_scalar(tile(), tile(), nl.add, "1"),
        lambda x: nisa.tensor_copy(tile(), 3.0),
        lambda x: nisa.memset(tile(), tile()),
    ],
)
def test_unknown_names_and_arguments_raise(call):
    with pytest.raises((TypeError, AttributeError)):
        simulate(call, X)


def test_outside_a_kernel():
    with pytest.raises(RuntimeError, match="inside a kernel"):
        nl.ndarray((4, 4), dtype=nl.float32)


def test_grid():
    with refused("C21"):
        emulator.jit(lambda x: x)[3]
    with pytest.raises(emulator.NkiValidationError, match="unknown target"):
        emulator.simulate(lambda x: x, target="trn9")


def test_loaded_constant():
    def kernel(x):
        return stored(loaded(nl.shared_constant(np.arange(6, dtype=np.float32).reshape(2, 3))))

    np.testing.assert_array_equal(simulate(kernel, X), [[0, 1, 2], [3, 4, 5]])
