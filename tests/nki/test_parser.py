"""The parser front end's Python subset, and its dynamic loops."""

import enum
import sys
import types
from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from tests.nki.kit import loaded, refused, sbuf, simulate, stored

from kdk.backends.nki import emulator
from kdk.backends.nki.emulator import parser_subset

X = np.ones((16, 8), np.float32)


def parse(kernel, *args):
    return emulator.simulate(kernel, frontend="parser")(*(args or (X,)))


def uses_is(x):
    y = None
    return x if y is None else y


def keyword_only(x, *, y=1):
    return x


def helper_with_try(x):
    try:
        return x
    except ValueError:
        return x


def calls_a_helper(x):
    return helper_with_try(x)


def uses_a_generator(x):
    return x[0 : sum(i for i in range(6))]


def inner_with_decorator(x):
    @np.vectorize
    def inner(y):
        return y

    return x


def integer_keys(x):
    table = {1: 2}
    return x[0 : 14 + table[1]]


class Plain:
    pass


class Two(nl.NKIObject, Plain):
    pass


def uses_a_class(x):
    Two()
    return x


@dataclass
class Config(nl.NKIObject):
    rows: int = 16


class Mode(enum.Enum):
    FAST = 1


def fine(x, config, mode):
    sizes = [config.rows, 8]
    if mode == Mode.FAST and config != None:  # noqa: E711
        tile = sbuf(tuple(sizes))
        nisa.dma_copy(tile, x)
        nisa.tensor_scalar(tile, tile, nl.add, 1.0)
        return stored(tile)
    return x


REJECTED = [uses_is, keyword_only, calls_a_helper, uses_a_generator, inner_with_decorator, integer_keys, uses_a_class]


@pytest.mark.parametrize("kernel", REJECTED)
def test_rejected_python(kernel):
    with refused("C26", match=r"At test_parser.py:\d+"):
        parse(kernel)


def test_rejected_arguments():
    def kernel(x, sizes):
        return stored(loaded(x))

    with refused("C26", match="argument 1 is a list"):
        parse(kernel, X, [1, 2])
    with refused("C26", match="key 1"):
        parse(kernel, X, {1: 2})
    parse(kernel, X, (1, 2))


def test_accepted_python():
    assert (parse(fine, X, Config(), Mode.FAST) == 2).all()


def test_the_tracer_accepts_all_of_it():
    for kernel in REJECTED:

        def copied(x, kernel=kernel):
            return stored(loaded(kernel(x)))

        simulate(copied, X)


def test_dynamic_range_and_while_on_a_register():
    def kernel(x, count):
        total, counter, one = nl.zeros((16, 8), nl.float32), loaded(count), nl.full((1, 1), 1, nl.int32)
        register = nisa.register_alloc()
        nisa.register_load(register, counter)
        for i in nl.dynamic_range(register):
            tile = sbuf((16, 8))
            nisa.dma_copy(tile, x.ap([[8, 16], [1, 8]], scalar_offset=i))
            nisa.tensor_tensor(total, total, tile, nl.add)
        while register:
            nisa.tensor_scalar(total, total, nl.multiply, 2.0)
            nisa.tensor_tensor(counter, counter, one, nl.subtract)
            nisa.register_load(register, counter)
        return stored(total)

    x = np.arange(3 * 16 * 8, dtype=np.float32).reshape(3, 16, 8)
    np.testing.assert_array_equal(parse(kernel, x, np.array([[2]], np.int32)), (x[0] + x[1]) * 4)
    with refused("C24"):
        simulate(kernel, x, np.array([[2]], np.int32))


def test_unknown_front_end():
    with pytest.raises(ValueError, match="tracer, parser"):
        emulator.simulate(fine, frontend="ast")


@dataclass
class Settings(nl.NKIObject):
    size: int
    half: int
    unannotated = 3

    def __post_init__(self):
        self.half = self.size // 2


class Undecorated(nl.NKIObject):
    size: int
    step: int = 2
    function: object = min

    def method(self):
        return self.function(self.size, self.step)


def makes_objects(x):
    made, plain = Settings(size=8), Undecorated(8)
    assert (made.half, made.unannotated, Settings(4, unannotated=5).unannotated) == (4, 3, 5)
    assert (plain.size, plain.method(), Undecorated().size) == (8, 2, None)
    return stored(loaded(x[0 : made.size]))


def test_objects_are_made_as_the_compiler_makes_them():
    """The parser front end writes __init__: every field is an argument that may be left out, with @dataclass or not."""
    np.testing.assert_array_equal(parse(makes_objects), X[:8])
    with pytest.raises(TypeError, match="fields"):
        parse(makes_an_unknown_field)
    with pytest.raises(TypeError):  # the tracer runs Python's own dataclasses
        simulate(makes_objects, X)


def makes_an_unknown_field(x):
    Settings(sizes=8)
    return stored(loaded(x))


@emulator.jit
def inner_kernel(x):
    return uses_is(x)


def calls_a_kernel(x):
    return inner_kernel(x)


def test_what_a_kernel_calls_is_checked_too():
    """A kernel inside a kernel, a function of a module, and a package whose name begins with "nki"."""
    for kernel in (calls_a_kernel, calls_through_a_module):
        with refused("C26"):
            parse(kernel)
    assert parser_subset._is_ours(types.FunctionType(uses_is.__code__, {"__name__": "nkilib.core"}))
    assert not parser_subset._is_ours(nl.load)


def calls_through_a_module(x):
    return THIS.uses_is(x)


THIS = sys.modules[__name__]
