"""nki.language: creating tensors and moving them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import access, isa
from ..allocation import allocate
from ..allocation import constant as embed
from ..core import current
from ..dtypes import NUMPY, dtype_name, is_integer
from ..errors import need
from ..isa.dma import broadcast_partition
from ..memory import PSUM, SBUF, WRITTEN
from ..tensor import DynamicSlice, NkiTensor


def ndarray(shape: Any, dtype: Any, buffer: Any = SBUF, name: str = "", address: Any = None) -> NkiTensor:
    """A new tensor without values; `address` is (partition, byte offset in the partition).

    The vendor's text counts the free offset in elements, its examples and public kernels in bytes; bytes here.
    """
    return allocate(shape, dtype, buffer, name, address)


def full(shape: Any, fill_value: float, dtype: Any, buffer: Any = SBUF, name: str = "") -> NkiTensor:
    t = allocate(shape, dtype, buffer, name)
    value = int(fill_value) if is_integer(t.dtype) else float(fill_value)
    if t.on_chip:
        isa.memset(t, value)
        return t
    # in HBM there is no engine to fill it: through a tile, a block of rows at a time
    flat = t.reshape((t.size // t.shape[-1], t.shape[-1]))
    for first in range(0, flat.shape[0], 128):
        rows = flat[first : min(first + 128, flat.shape[0])]
        tile = allocate(rows.shape, t.dtype)
        isa.memset(tile, value)
        isa.dma_copy(rows, tile)
    return t


def zeros(shape: Any, dtype: Any, buffer: Any = SBUF, name: str = "") -> NkiTensor:
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Any, dtype: Any, buffer: Any = SBUF, name: str = "") -> NkiTensor:
    return full(shape, 1, dtype, buffer, name)


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    return full(x.shape, 0, dtype or x.dtype, buffer or x.buffer, name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    return allocate(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def shared_constant(constant: Any) -> NkiTensor:
    """A tensor in shared HBM with the content of an array or of a .npy file."""
    return embed(np.load(constant) if isinstance(constant, str) else np.asarray(constant), "constant")


def shared_identity_matrix(n: int, dtype: Any = "uint8", dst: NkiTensor | None = None) -> NkiTensor:
    """The n by n identity in SBUF."""
    name = dtype_name(dtype) if dst is None else dst.dtype
    t = allocate((n, n), name) if dst is None else dst
    access.open_tile(t)
    if current().data:
        access.array(t)[...] = np.eye(n).astype(NUMPY[name])
    access.mark(t, True, WRITTEN)
    access.touch(t)
    return t


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new tile in SBUF with the content of a tensor in HBM."""
    need(not src.on_chip, "memory", f"nl.load reads HBM, not {src}")
    t = allocate(src.shape, dtype or src.dtype)
    isa.dma_copy(t, src)
    return t


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Write a tile of SBUF to a tensor in HBM."""
    if not isinstance(value, NkiTensor):
        raise TypeError(f"nl.store of {value!r}: expected a tile")
    need(value.buffer is not PSUM, "operator", f"nl.store from PSUM only simulates; copy {value} to SBUF first")
    need(not dst.on_chip and value.on_chip, "memory", f"nl.store moves SBUF to HBM, not {value} to {dst}")
    isa.dma_copy(dst, value)


def load_transpose2d(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new tile with the transpose of a two-dimensional tensor in HBM."""
    need(src.ndim == 2, "shape", f"nl.load_transpose2d of {src}")
    t = allocate(src.shape[::-1], src.dtype)
    isa.dma_transpose(t, src)
    return t if dtype in (None, t.dtype) else copy(t, dtype)


def copy(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new tile in SBUF with the content of a tile in SBUF or PSUM."""
    t = allocate(x.shape, dtype or x.dtype)
    isa.tensor_copy(t, x)
    return t


def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """The transpose of a two-dimensional tile, in PSUM."""
    need(x.ndim == 2, "shape", f"nl.transpose of {x}")
    need(
        dtype is None or dtype_name(dtype) == x.dtype,
        "dtype",
        f"nl.transpose {x.dtype} to {dtype}; copy with a dtype instead",
    )
    t = allocate(x.shape[::-1], x.dtype, PSUM)
    isa.nc_transpose(t, x)
    return t


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """x.T @ y in PSUM, with transpose_x=True; without it the vendor's version does not work."""
    need(transpose_x, "operator", "nl.matmul with transpose_x=False does not compile; transpose x first")
    t = allocate((x.shape[1], y.shape[1]), "float32", PSUM)
    isa.nc_matmul(t, x, y)
    return t


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    return x.expand_dim(axis % (x.ndim + 1))


def broadcast_to(x: NkiTensor, shape: Sequence[int], dtype: Any = None) -> NkiTensor:
    """A tile with repeated content; from one partition to many through a DMA."""
    shape = tuple(shape)
    fits = len(shape) == x.ndim and all(a in (1, b) for a, b in zip(x.shape, shape))
    need(fits, "shape", f"nl.broadcast_to {list(x.shape)} to {list(shape)}")
    name = dtype_name(x.dtype if dtype is None else dtype)
    if shape == x.shape and name == x.dtype:
        return x
    t = allocate(shape, name)
    wide = x._view(shape, [0 if a != b else s for a, b, s in zip(x.shape, shape, x.strides)])
    if x.shape[0] == shape[0]:
        isa.tensor_copy(t, wide)
    else:
        broadcast_partition(t, wide)
    return t


def gather_flattened(data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: Any = None) -> NkiTensor:
    """data[p, indices[p, j]] per partition."""
    need(axis == 0, "argument", f"nl.gather_flattened along axis {axis}; only 0")
    t = allocate(indices.shape, data.dtype)
    isa.nc_n_gather(t, data, indices)
    return t if dtype is None else copy(t, dtype)


def ds(start: int, size: int) -> DynamicSlice:
    """A slice of `size` elements from `start`, both known while tracing."""
    for what, value in (("start", start), ("size", size)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"nl.ds: {what} {value!r} is known at run time only; use .ap(scalar_offset=)")
    return DynamicSlice(int(start), int(size))
