"""Registers and dynamic loops: what they compute and what they refuse."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from tests.nki.kit import loaded, refused, sbuf, simulate, stored, values

X = values(np.random.default_rng(0), (4, 16, 8))


def hbm(shape, dtype="float32"):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)


def sum_of_rows(x, count):
    """Sum x[0:count] with a loop whose bound is known on the device only."""
    total = nl.zeros((16, 8), nl.float32)
    bound = nisa.register_alloc()
    nisa.register_load(bound, loaded(count))

    def body(i):
        tile = sbuf((16, 8))
        nisa.dma_copy(tile, x.ap([[8, 16], [1, 8]], scalar_offset=i))
        nisa.tensor_tensor(total, total, tile, nl.add)

    nl.fori_loop(0, bound, body)
    return stored(total)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_fori_loop(count):
    got = simulate(sum_of_rows, X, np.array([[count]], np.int32))
    np.testing.assert_allclose(got, X[:count].sum(0), rtol=1e-6, atol=1e-6)


def test_fori_loop_with_step():
    def kernel(x):
        out = hbm(x.shape)
        nisa.dma_copy(out, x)

        def body(i):
            tile = nl.zeros((16, 8), nl.float32)
            nisa.dma_copy(out.ap([[8, 16], [1, 8]], scalar_offset=i), tile)

        nl.fori_loop(1, 4, body, step=2)
        return out

    want = X.copy()
    want[1], want[3] = 0, 0
    np.testing.assert_array_equal(simulate(kernel, X), want)


@pytest.mark.parametrize("count", [0, 3])
def test_while_loop(count):
    """The flag-driven loop of the documentation."""

    def kernel(count):
        counter, one, total = loaded(count), sbuf((1, 1), "int32"), nl.zeros((1, 1), nl.float32)
        nisa.memset(one, 1)
        register = nisa.register_alloc()
        nisa.register_load(register, counter)

        def body(r):
            nisa.tensor_scalar(total, total, nl.add, 2.0)
            nisa.tensor_tensor(counter, counter, one, nl.subtract)
            nisa.register_load(r, counter)
            return r

        nl.while_loop(register, body)
        return stored(total)

    assert simulate(kernel, np.array([[count]], np.int32))[0, 0] == 2 * count


def test_registers_move_and_store():
    def kernel(x):
        a, b, out = nisa.register_alloc(7), nisa.register_alloc(), sbuf((1, 1), "int32")
        nisa.register_move(b, a)
        nisa.register_move(a, 9)
        nisa.register_store(out, b)
        return stored(out)

    assert simulate(kernel, X)[0, 0] == 7


def test_nested_loops_with_a_bound_that_changes():
    """The inner bound is the outer index: 0 + 1 + 2 iterations."""

    def kernel(x):
        total, count, one = nl.zeros((1, 1), nl.int32), sbuf((1, 1), "int32"), nl.full((1, 1), 1, nl.int32)
        nisa.memset(count, 0)
        bound = nisa.register_alloc()

        def outer(i):
            nisa.register_load(bound, count)
            nl.fori_loop(0, bound, lambda j: nisa.tensor_tensor(total, total, one, nl.add) and None)
            nisa.tensor_tensor(count, count, one, nl.add)

        nl.fori_loop(0, 3, outer)
        return stored(total)

    assert simulate(kernel, X)[0, 0] == 3


def run_body(body, upper=2, **settings):
    def kernel(x):
        nl.fori_loop(0, upper, lambda i: body(x, i), **settings)
        return x

    return simulate(kernel, X.copy())


def leak(x):
    """A tile of the body used after the loop."""
    kept = []
    nl.fori_loop(0, 1, lambda i: kept.append(nl.zeros((16, 8), nl.float32)))
    return stored(kept[0])


def late_register(x):
    kept = []
    nl.fori_loop(0, 1, lambda i: kept.append(i))
    nisa.dma_copy(sbuf((16, 8)), x.ap([[8, 16], [1, 8]], scalar_offset=kept[0]))


def changing_state(x):
    seen = []

    def body(i):
        seen.append(i)
        for _ in seen:
            nisa.dma_copy(x.ap([[8, 16], [1, 8]], scalar_offset=i), nl.zeros((16, 8), nl.float32))

    nl.fori_loop(0, 3, body)
    return x


def inside_no_reorder(x):
    with nl.no_reorder():
        nl.fori_loop(0, 1, lambda i: None)


def across_the_edge(x):
    outside = nisa.memset(sbuf((16, 8)), 0.0)
    handles = []
    nl.fori_loop(0, 1, lambda i: handles.append(nisa.memset(sbuf((16, 8)), 0.0)))
    outside.depends_on(handles[0])


def writes_the_index(x):
    nl.fori_loop(0, 1, lambda i: nisa.register_move(i, 3))


@pytest.mark.parametrize("kernel", [leak, late_register, changing_state, inside_no_reorder, across_the_edge, writes_the_index])
def test_rules_of_dynamic_loops(kernel):
    with refused("C17"):
        simulate(kernel, X.copy())


@pytest.mark.parametrize(
    "use", [lambda i: i + 1, lambda i: range(i), lambda i: 1 if i else 0, lambda i: int(i), lambda i: i < 3, lambda i: nl.ds(i, 4)]
)
def test_registers_have_no_value_in_python(use):
    with pytest.raises(TypeError):
        run_body(lambda x, i: use(i))


def test_bodies_and_steps():
    with refused("C17"):
        run_body(lambda x, i: 5)
    with refused("C17"):
        run_body(lambda x, i: None, step=0)


def test_depends_on_inside_one_loop_and_from_an_outer_one():
    def kernel(x):
        outer = nisa.memset(sbuf((16, 8)), 0.0)

        def body(i):
            tile = sbuf((16, 8))
            first = nisa.memset(tile, 1.0)
            nisa.dma_copy(x.ap([[8, 16], [1, 8]], scalar_offset=i), tile).depends_on(first, outer)

        nl.fori_loop(0, 4, body)
        return x

    assert (simulate(kernel, X.copy()) == 1).all()


def test_without_data_an_unknown_bound_runs_the_body_once():
    from kdk.backends.nki import emulator

    sim = emulator.simulate(sum_of_rows, data=False)
    sim(X, np.array([[4]], np.int32))
    assert [r.op for r in sim.trace].count("tensor_tensor") == 1
