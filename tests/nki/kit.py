"""Helpers of the emulator's tests: run one instruction on arrays, and expect a refusal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from kdk.backends.nki import emulator

NUMPY = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
}
FLOATS = ("float32", "bfloat16", "float16")


def sbuf(shape: tuple, dtype: str = "float32", address: Any = None) -> Any:
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf, address=address)


def psum(shape: tuple, dtype: str = "float32", address: Any = None) -> Any:
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum, address=address)


def loaded(x: Any) -> Any:
    tile = sbuf(x.shape, x.dtype)
    nisa.dma_copy(dst=tile, src=x)
    return tile


def stored(tile: Any) -> Any:
    """A tile as an output of the kernel."""
    if tile.buffer == nl.psum:
        copy = sbuf(tile.shape, tile.dtype)
        nisa.tensor_copy(copy, tile)
        tile = copy
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def simulate(kernel: Callable, *arrays: Any, target: str = "trn2", **settings: Any) -> Any:
    return emulator.simulate(kernel, target=target, **settings)(*arrays)


def run(issue: Callable[..., Any], *arrays: np.ndarray, out: Any, target: str = "trn2") -> Any:
    """`issue(outputs..., tiles...)` on the arrays loaded into SBUF; `out` lists (shape, dtype) of the outputs."""
    specs = out if isinstance(out, list) else [out]

    def kernel(*inputs: Any) -> Any:
        tiles = [loaded(x) for x in inputs]
        outputs = [sbuf(shape, dtype) for shape, dtype in specs]
        issue(*outputs, *tiles)
        return tuple(stored(t) for t in outputs)

    results = simulate(kernel, *arrays, target=target)
    return results if isinstance(out, list) else results[0]


def values(rng: np.random.Generator, shape: tuple, dtype: str = "float32", scale: float = 1.0) -> np.ndarray:
    kind = np.dtype(NUMPY[dtype])
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return rng.integers(max(limits.min, -1000), min(limits.max, 1000), shape, endpoint=True).astype(kind)
    return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(kind)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """An independent statement of the one rounding: float32 to a storage dtype."""
    kind = np.dtype(NUMPY[dtype])
    x = np.asarray(x, np.float32)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return np.clip(np.round(x.astype(np.float64)), limits.min, limits.max).astype(kind)
    with np.errstate(over="ignore"):
        return x.astype(kind)


@contextlib.contextmanager
def refused(code: str, match: str | None = None) -> Iterator[None]:
    with pytest.raises(emulator.NkiValidationError, match=match) as caught:
        yield
    assert caught.value.code == code, str(caught.value)
    assert "Way out" in str(caught.value)
