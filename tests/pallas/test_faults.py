"""A planted fault of every class is found by the simulator, its correct twin passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kdk.backends.pallas.launch import prepare

pytest.importorskip("jax", reason="jax is the simulator")
prepare()
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

from kdk.backends.pallas import faults  # noqa: E402
from kdk.backends.pallas.simulate import run_simulated  # noqa: E402
from kdk.errors import FallbackWarning, SimulationError  # noqa: E402

X = torch.arange(24 * 128, dtype=torch.float32).reshape(24, 128) / 100


def row_of_blocks(i: Any) -> Any:
    return i, 0


def call(
    kernel: Callable[..., None],
    x: jax.Array,
    interpret: Any,
    *,
    grid: int,
    index: Callable[[Any], Any] = row_of_blocks,
    out: Callable[[Any], Any] = row_of_blocks,
    shape: tuple[int, int] | None = None,
    **more: Any,
) -> jax.Array:
    block = (8, 128)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(shape or x.shape, x.dtype),
        grid=(grid,),
        in_specs=[pl.BlockSpec(block, index)],
        out_specs=pl.BlockSpec(block, out),
        interpret=interpret,
        **more,
    )(x)


def double(x: Any, y: Any) -> None:
    y[...] = x[...] * 2


def caught(function: Callable[..., Any], x: torch.Tensor = X) -> SimulationError:
    with pytest.raises(SimulationError) as error:
        run_simulated(function, (x,), "v6e")
    assert function.__name__ in str(error.value)
    return error.value


# ---- out of bounds ----------------------------------------------------------------------------------------------------


def in_bounds(x: jax.Array, *, interpret: Any) -> jax.Array:
    return call(double, x, interpret, grid=3)


def block_outside(x: jax.Array, *, interpret: Any) -> jax.Array:
    return call(double, x, interpret, grid=3, index=lambda i: (i + 1, 0))


def output_block_outside(x: jax.Array, *, interpret: Any) -> jax.Array:
    return call(double, x, interpret, grid=3, out=lambda i: (i + 1, 0))


def slice_outside(x: jax.Array, *, interpret: Any) -> jax.Array:
    def kernel(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = x_ref[pl.ds(4 + pl.program_id(0), 8), :]

    return call(kernel, x, interpret, grid=3)


def test_blocks_in_bounds() -> None:
    assert torch.equal(run_simulated(in_bounds, (X,), "v6e"), X * 2)


@pytest.mark.parametrize("function", [block_outside, output_block_outside, slice_outside])
def test_out_of_bounds(function: Callable[..., Any]) -> None:
    error = caught(function)
    assert error.code == "KDK-PALLAS-BOUNDS"
    assert "(double)" in str(error) or "(kernel)" in str(error)


@pytest.mark.parametrize("rows", [1, 17, 20])
def test_a_block_past_the_edge_is_legal(rows: int) -> None:
    def padded(x: jax.Array, *, interpret: Any) -> jax.Array:
        return call(double, x, interpret, grid=pl.cdiv(rows, 8))

    assert torch.equal(run_simulated(padded, (X[:rows],), "v6e"), X[:rows] * 2)


# ---- uninitialised memory ---------------------------------------------------------------------------------------------


def summed(start: bool) -> Callable[..., Any]:
    """Sum of all blocks, in an output block that stays; without `start` it begins with what was there."""

    def sum_of_blocks(x: jax.Array, *, interpret: Any) -> jax.Array:
        def kernel(x_ref: Any, y_ref: Any) -> None:
            if start:

                @pl.when(pl.program_id(0) == 0)
                def _() -> None:
                    y_ref[...] = jnp.zeros_like(y_ref)

            y_ref[...] += x_ref[...]

        return call(kernel, x, interpret, grid=3, out=lambda i: (0, 0), shape=(8, 128))

    return sum_of_blocks


def scratch(written: bool) -> Callable[..., Any]:
    def through_scratch(x: jax.Array, *, interpret: Any) -> jax.Array:
        def kernel(x_ref: Any, y_ref: Any, kept: Any) -> None:
            if written:
                kept[...] = x_ref[...].astype(jnp.int32)
            y_ref[...] = kept[...].astype(jnp.float32)

        return call(kernel, x, interpret, grid=3, scratch_shapes=[pltpu.VMEM((8, 128), jnp.int32)])

    return through_scratch


def maximum(masked: bool) -> Callable[..., Any]:
    """The largest row of each block; unmasked, rows beyond the end take part."""

    def largest(x: jax.Array, *, interpret: Any) -> jax.Array:
        def kernel(x_ref: Any, y_ref: Any) -> None:
            values = x_ref[...]
            if masked:
                row = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0) + 8 * pl.program_id(0)
                values = jnp.where(row < x.shape[0], values, -jnp.inf)
            y_ref[...] = jnp.broadcast_to(jnp.max(values, axis=0, keepdims=True), y_ref.shape)

        return call(kernel, x, interpret, grid=pl.cdiv(x.shape[0], 8))

    return largest


def unwritten(x: jax.Array, *, interpret: Any) -> jax.Array:
    """The last block of the output is never written."""
    return call(double, x, interpret, grid=2)


def test_initialised() -> None:
    assert torch.equal(run_simulated(summed(True), (X,), "v6e"), X.reshape(3, 8, 128).sum(0))
    assert torch.equal(run_simulated(scratch(True), (X,), "v6e"), X.int().float())
    assert torch.equal(run_simulated(maximum(True), (X[:20],), "v6e")[19], X[19])


@pytest.mark.parametrize("function", [summed(False), scratch(False), maximum(False), unwritten])
def test_uninitialised(function: Callable[..., Any]) -> None:
    error = caught(function, X[:20] if function.__name__ == "largest" else X)
    assert error.code == "KDK-PALLAS-UNINITIALIZED"


# ---- DMA --------------------------------------------------------------------------------------------------------------


def copied(wait: str, rows: int = 8, first: int = 8) -> Callable[..., Any]:
    """One block fetched from HBM by hand."""

    def by_dma(x: jax.Array, *, interpret: Any) -> jax.Array:
        def kernel(x_ref: Any, y_ref: Any, buffer: Any, semaphore: Any) -> None:
            copy = pltpu.make_async_copy(x_ref.at[pl.ds(first + pl.program_id(0), rows), :], buffer, semaphore)
            copy.start()
            if wait == "before":
                copy.wait()
            y_ref[...] = buffer[...] * 2
            if wait == "after":
                copy.wait()

        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((rows, 128), x.dtype),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[pltpu.VMEM((rows, 128), x.dtype), pltpu.SemaphoreType.DMA],
            interpret=interpret,
        )(x)

    return by_dma


def test_dma_waited_for() -> None:
    assert torch.equal(run_simulated(copied("before"), (X,), "v6e"), X[8:16] * 2)


@pytest.mark.parametrize("wait", ["after", "never"])
def test_dma_read_too_early(wait: str) -> None:
    error = caught(copied(wait))
    assert error.code == "KDK-PALLAS-RACE"
    assert "a read (" in str(error) and "test_faults.py" in str(error)


def test_dma_out_of_bounds() -> None:
    assert caught(copied("before", first=20)).code == "KDK-PALLAS-BOUNDS"


# ---- parallel dimensions ----------------------------------------------------------------------------------------------


def parallel(own: bool) -> Callable[..., Any]:
    """Grid points of a parallel dimension, each with its own output block, or all with one."""

    def over_cores(x: jax.Array, *, interpret: Any) -> jax.Array:
        params = pltpu.CompilerParams(dimension_semantics=("parallel",))
        shape, out = (x.shape, lambda i: (i, 0)) if own else ((8, 128), lambda i: (0, 0))
        return call(double, x, interpret, grid=x.shape[0] // 8, out=out, shape=shape, compiler_params=params)

    return over_cores


def test_parallel_blocks_of_their_own() -> None:
    assert torch.equal(run_simulated(parallel(True), (X[:16],), "v6e"), X[:16] * 2)


def test_parallel_points_that_share_a_block() -> None:
    assert caught(parallel(False), X[:16]).code == "KDK-PALLAS-RACE"


def revisits(x: jax.Array, *, interpret: Any) -> jax.Array:
    return call(double, x, interpret, grid=3, out=lambda i: (i % 2, 0), shape=(16, 128))


def test_output_block_written_again_later() -> None:
    assert caught(revisits).code == "KDK-PALLAS-REVISIT"


# ---- the limits -------------------------------------------------------------------------------------------------------


def test_large_problems_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    function = summed(False)
    monkeypatch.setattr(faults, "MOST_POINTS", 2)
    assert run_simulated(function, (X,), "v6e").isnan().all(), "only values: the fast interpreter's memory is full of NaN"
    monkeypatch.setattr(faults, "MOST_POINTS", 64)
    monkeypatch.setattr(faults, "MOST_ELEMENTS", X.numel() - 1)
    assert run_simulated(function, (X,), "v6e").isnan().all()
    monkeypatch.setattr(faults, "MOST_ELEMENTS", X.numel())
    monkeypatch.setattr(faults, "MOST_ACCESSES", 3 * 4 - 1)  # of three points: two blocks, one read, one write
    assert run_simulated(function, (X,), "v6e").isnan().all()
    monkeypatch.setattr(faults, "MOST_ACCESSES", 3 * 5)
    caught(function)


def test_a_few_forms_of_a_kernel_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []

    def run(interpreted: Any, args: Any, where: str) -> list[Any]:
        searched.append(args[0].shape)
        return []

    monkeypatch.setattr(faults, "_run", run)
    monkeypatch.setattr(faults, "_FAULTLESS", {})

    def any_rows(x: jax.Array, *, interpret: Any) -> jax.Array:
        return call(double, x, interpret, grid=pl.cdiv(x.shape[0], 8))

    for rows in (8, 8, 20, 24):  # one block, the same, past the edge, several
        run_simulated(any_rows, (X[:rows],), "v6e")
    assert [shape[0] for shape in searched[::2]] == [8, 20, 24]
    monkeypatch.setattr(faults, "MOST_FORMS", 3)
    run_simulated(any_rows, (X[:4],), "v6e")
    assert len(searched) == 6


def test_what_the_interpreter_lacks_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*args: Any) -> Any:
        raise NotImplementedError("masked load")

    monkeypatch.setattr(faults, "_run", lacking)
    monkeypatch.setattr(faults, "_FAULTLESS", {})
    with pytest.warns(FallbackWarning, match=r"in_bounds \(double\): only its values are simulated; .* masked load"):
        assert torch.equal(run_simulated(in_bounds, (X,), "v6e"), X * 2)
