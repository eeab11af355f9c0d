"""Views: every method aliases the storage, and addresses what NumPy's same view addresses."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nki.kit import loaded, refused, sbuf, simulate, stored

QUICK = settings(max_examples=15, deadline=None)


def read(view_of, x):
    """The content of a view of a loaded tile."""

    def kernel(x):
        view = view_of(loaded(x))
        tile = sbuf(view.shape, view.dtype)
        nisa.tensor_copy(tile, view)
        return stored(tile)

    return simulate(kernel, x)


VIEWS = {
    "slice": (lambda t: t.slice(1, 1, 4).slice(2, 0, 6, 2), lambda x: x[:, 1:4, 0:6:2]),
    "select": (lambda t: t.select(1, 2), lambda x: x[:, 2]),
    "getitem": (lambda t: t[32:64, -1, nl.ds(1, 3)], lambda x: x[32:64, -1, 1:4]),
    "ellipsis": (lambda t: t[..., 2:5], lambda x: x[..., 2:5]),
    "partition integer": (lambda t: t[32], lambda x: x[32:33]),
    "permute": (lambda t: t.permute((0, 2, 1)), lambda x: x.transpose(0, 2, 1)),
    "broadcast": (lambda t: t.slice(2, 3, 4).broadcast(2, 5), lambda x: x[:, :, 3:4].repeat(5, 2)),
    "expand and squeeze": (lambda t: t.expand_dim(1).squeeze_dim(1), lambda x: x),
    "reshape": (lambda t: t.reshape((64, 2, 2, 3, 2)), lambda x: x.reshape(64, 2, 2, 3, 2)),
    "reshape_dim": (lambda t: t.reshape_dim(2, (2, -1)), lambda x: x.reshape(64, 4, 2, 3)),
    "flatten_dims": (lambda t: t.flatten_dims(1, 2), lambda x: x.reshape(64, 24)),
    "rearrange": (
        lambda t: t.rearrange(("p", ("a", "b"), "c"), ("p", "c", ("a", "b")), {"a": 2}),
        lambda x: x.transpose(0, 2, 1),
    ),
    "ap": (lambda t: t.ap([[24, 32], [2, 5]], offset=24 * 32 + 3), lambda x: x.reshape(64, 24)[32:, 3:13:2]),
    "ap backwards": (lambda t: t.ap([[24, 64], [-2, 3]], offset=4), lambda x: x.reshape(64, 24)[:, 4::-2]),
    "ap overlaps": (
        lambda t: t.ap([[24, 64], [1, 4], [1, 3]]),
        lambda x: np.stack([x.reshape(64, 24)[:, i : i + 3] for i in range(4)], 1),
    ),
    "view": (lambda t: t.view(nl.uint16), lambda x: x.view(np.uint16)),
    "view of a slice": (lambda t: t[:, 1].view("uint8").view("float32"), lambda x: x[:, 1]),
    "ap with dtype": (
        lambda t: t.ap([[48, 64], [2, 24]], offset=1, dtype=nl.uint16),
        lambda x: x.reshape(64, 24).view(np.uint16)[:, 1::2],
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_read_what_numpy_reads(name):
    view_of, formula = VIEWS[name]
    x = np.random.default_rng(0).integers(0, 1 << 24, (64, 4, 6), np.uint32)
    x = x.astype(np.float32) if name == "view of a slice" else x
    np.testing.assert_array_equal(read(view_of, x), formula(x))


@pytest.mark.parametrize("name", [n for n in VIEWS if n not in ("broadcast", "ap overlaps")])
def test_views_write_through(name):
    view_of, formula = VIEWS[name]
    x = np.zeros((64, 4, 6), np.float32 if name == "view of a slice" else np.uint32)

    def kernel(x):
        tile = loaded(x)
        nisa.memset(view_of(tile), 1.0 if name == "view of a slice" else 1)
        return stored(tile)

    got, want = simulate(kernel, x), x.copy()
    view = formula(want)
    assert np.shares_memory(view, want)
    view[...] = 1
    np.testing.assert_array_equal(got, want)


@QUICK
@given(st.data())
def test_chains_of_views(data):
    """Random chains of slice, permute, reshape_dim and flatten_dims, in step with NumPy."""
    x = np.arange(32 * 4 * 6 * 2, dtype=np.int32).reshape(32, 4, 6, 2)
    steps = []
    y = x
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["slice", "permute", "split"]))
        dim = data.draw(st.integers(1, y.ndim - 1))
        if kind == "slice":
            n = y.shape[dim]
            start = data.draw(st.integers(0, n - 1))
            end, step = data.draw(st.integers(start + 1, n)), data.draw(st.integers(1, 3))
            steps.append(lambda t, d=dim, a=start, b=end, s=step: t.slice(d, a, b, s))
            y = y[(slice(None),) * dim + (slice(start, end, step),)]
        elif kind == "permute":
            order = (0, *data.draw(st.permutations(range(1, y.ndim))))
            steps.append(lambda t, o=order: t.permute(o))
            y = y.transpose(order)
        elif y.ndim < 5:
            factor = data.draw(st.sampled_from([f for f in range(1, y.shape[dim] + 1) if y.shape[dim] % f == 0]))
            steps.append(lambda t, d=dim, f=factor: t.reshape_dim(d, (f, -1)))
            y = y.reshape(y.shape[:dim] + (factor, -1) + y.shape[dim + 1 :])

    def kernel(x):
        view = loaded(x)
        for step in steps:
            view = step(view)
        assert view.shape == y.shape
        assert view.get_pattern() == [[s, n] for s, n in zip(view.strides, view.shape)]
        out = nl.ndarray(y.shape, dtype=nl.int32, buffer=nl.shared_hbm)
        nisa.dma_copy(out, view)
        return out

    np.testing.assert_array_equal(simulate(kernel, x), y)


def test_integer_index_drops_dimensions_in_hbm():
    def kernel(x):
        assert x[1].shape == (3, 4) and x[1, 2].shape == (4,) and x[1, 2, 3].shape == (1,)
        assert x.select(1, 2).shape == (2, 4)
        assert loaded(x[0])[:, 1].shape == (3, 1)
        return stored(loaded(x[1]))

    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(simulate(kernel, x), x[1])


def test_attributes():
    def kernel(x):
        tile = loaded(x)
        assert (tile.shape, tile.strides, tile.offset, tile.ndim, tile.size) == ((4, 6, 2), (12, 2, 1), 0, 3, 48)
        assert tile.dtype == "float32" and tile.buffer is nl.sbuf
        assert tile.is_contiguous() and tile[:, 1:3].is_contiguous() is True
        assert not tile[:, :, 0].is_contiguous() and not tile.permute((0, 2, 1)).is_contiguous()
        assert not tile.is_indirect()
        assert bool(tile)  # there is a tensor, as in `if bias:`
        for use in (iter, int, lambda t: bool(t[0:1, 0:1, 0])):
            with pytest.raises(TypeError):
                use(tile)
        return stored(tile)

    simulate(kernel, np.zeros((4, 6, 2), np.float32))


REFUSED = {
    "permute moves the partition": ("C6", lambda t: t.permute((1, 0, 2))),
    "reshape of the partition": ("C2", lambda t: t.reshape((32, 2, 24))),
    "reshape needs a copy": ("C6", lambda t: t.permute((0, 2, 1)).reshape((64, 24))),
    "wrong element count": ("C2", lambda t: t.reshape((64, 23))),
    "broadcast of a larger dimension": ("C2", lambda t: t.broadcast(1, 8)),
    "slice beyond the end": ("C14", lambda t: t[:, 0:5]),
    "index beyond the end": ("C14", lambda t: t[:, 4]),
    "ap beyond the end": ("C14", lambda t: t.ap([[24, 64], [1, 25]])),
    "ap before the start": ("C14", lambda t: t.ap([[24, 64], [-2, 3]], offset=3)),
    "ap skips partitions": ("C6", lambda t: t.ap([[48, 32], [1, 24]])),
    "view of a strided last dimension": ("C6", lambda t: t[:, :, 0:6:2].view("uint8")),
    "expand before the partition": ("C6", lambda t: t.expand_dim(0)),
    "assignment": ("C24", lambda t: t.__setitem__(0, 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_views(name):
    code, view_of = REFUSED[name]
    with refused(code):
        simulate(lambda x: view_of(loaded(x)), np.zeros((64, 4, 6), np.float32))


def test_run_time_values_do_not_index():
    def kernel(x):
        t = loaded(x)
        t[:, t]

    with pytest.raises(TypeError, match="scalar_offset"):
        simulate(kernel, np.zeros((4, 4), np.int32))
