"""NkiTensor: a storage and a strided view of it. Every method returns another view of the same bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from . import strides as walk
from .dtypes import ITEMSIZE, dtype_name
from .errors import need, refuse
from .memory import HBM, ON_CHIP, SBUF, SHARED, MemoryRegion, Storage
from .objects import Dynamic, DynamicSlice, Indirection, NKIObject, VirtualRegister


class NkiTensor(NKIObject):
    """A strided view of a storage. Strides and offset count elements; on chip, dimension 0 is the partition."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        storage: Storage,
        buffer: MemoryRegion = SBUF,
        name: str = "",
        *,
        strides: Sequence[int] | None = None,
        offset: int = 0,
        dynamic: Dynamic | None = None,
        indirection: Indirection | None = None,
    ) -> None:
        self.shape = tuple(int(n) for n in shape)
        self.dtype = dtype_name(dtype)
        self.storage, self.buffer, self.name = storage, buffer, name
        self.strides = walk.row_major(self.shape) if strides is None else tuple(strides)
        self.offset = offset
        self.dynamic = dynamic
        self.indirection = indirection

    # -- what the view is

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def on_chip(self) -> bool:
        return self.buffer in ON_CHIP

    @property
    def partitions(self) -> int:
        return self.shape[0]

    @property
    def per_partition(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def row_elements(self) -> int:
        """Elements of this dtype in one partition of the storage: the partition stride."""
        return self.storage.row // self.itemsize

    @property
    def start_partition(self) -> int:
        return self.storage.base // self.storage.pitch + self.offset // max(1, self.row_elements)

    def is_indirect(self) -> bool:
        return self.dynamic is not None

    def is_contiguous(self) -> bool:
        first = 1 if self.on_chip else 0
        dense = walk.row_major(self.shape)
        return all(n == 1 or s == w for n, s, w in list(zip(self.shape, self.strides, dense))[first:])

    def get_pattern(self) -> list[list[int]]:
        return [[s, n] for s, n in zip(self.strides, self.shape)]

    def __repr__(self) -> str:
        return f"<{self.name or 'tensor'}: {self.dtype}{list(self.shape)} in {self.buffer.value}>"

    def _no_value(self) -> NoReturn:
        raise TypeError("a tensor has no value while the kernel is traced; compare with an instruction and use its result as data")

    __int__ = __float__ = __index__ = _no_value  # type: ignore[assignment]

    def __bool__(self) -> bool:
        """True: the public class defines no truth value, so `if bias:` asks, as for any object, whether there is one.

        Refused for a single element, which would be taken for its value.
        """
        if self.size == 1:
            self._no_value()
        return True

    def __iter__(self) -> Any:
        raise TypeError("a tensor cannot be iterated; loop over range(t.shape[0]) and slice")

    def __setitem__(self, key: Any, value: Any) -> None:
        refuse("removed", f"assignment to elements of {self}; use nl.store or an nki.isa instruction")

    # -- views

    def _view(self, shape: Sequence[int], strides: Sequence[int], offset: int | None = None, **changes: Any) -> NkiTensor:
        settings = {"dtype": self.dtype, "dynamic": self.dynamic, "indirection": self.indirection} | changes
        dtype = settings.pop("dtype")
        return NkiTensor(
            shape,
            dtype,
            self.storage,
            self.buffer,
            self.name,
            strides=strides,
            offset=self.offset if offset is None else offset,
            **settings,
        )

    def _fixed_partition(self) -> bool:
        """Dimension 0 stays where it is: on chip, and after a per-partition selection."""
        return self.on_chip or (self.dynamic is not None and self.dynamic.kind == "vector")

    def _dimension(self, dim: int, method: str) -> int:
        if not isinstance(dim, (int, np.integer)) or not -self.ndim <= dim < self.ndim:
            refuse("bounds", f"{method}: dimension {dim} of {self}")
        return int(dim) % self.ndim

    def _without(self, dim: int) -> NkiTensor:
        return self._view(self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :])

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        dim = self._dimension(dim, "slice")
        for what, value in (("start", start), ("end", end), ("step", step)):
            if isinstance(value, (NkiTensor, VirtualRegister)):
                raise TypeError(f"slice: {what} is known at run time only; use .ap(scalar_offset=) or .select")
        if self.indirection is not None or (dim == 0 and self.dynamic is not None and self.dynamic.kind == "vector"):
            refuse("pattern", f"slice of dimension {dim} of the indirect view {self}")
        if not (0 <= start < end <= self.shape[dim] and step >= 1):
            refuse("bounds", f"slice {start}:{end}:{step} of dimension {dim} of {self}")
        shape, strides = list(self.shape), list(self.strides)
        shape[dim] = -(-(end - start) // step)
        strides[dim] *= step
        return self._view(shape, strides, self.offset + int(start) * self.strides[dim])

    def select(self, dim: int, index: Any) -> NkiTensor:
        dim = self._dimension(dim, "select")
        if isinstance(index, (NkiTensor, VirtualRegister)):
            need(self.dynamic is None, "pattern", f"a second dynamic index into {self}")
            need(dim > 0 or not self.on_chip, "pattern", f"select: the partition of {self} cannot be chosen at run time")
            rest = self._without(dim) if self.ndim > (2 if self.on_chip else 1) else self.slice(dim, 0, 1)
            return rest._view(
                rest.shape,
                rest.strides,
                dynamic=Dynamic("scalar", _scalar_index(index), self.strides[dim] * self.itemsize),
            )
        if not 0 <= index < self.shape[dim]:
            refuse("bounds", f"index {index} in dimension {dim} of {self}")
        part = self.slice(dim, index, index + 1)
        keep = (dim == 0 or self.ndim <= 2) if self.on_chip else self.ndim == 1
        return part if keep else part._without(dim)

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        need(
            dim == 0 and not self.on_chip,
            "pattern",
            f"vector_select: dimension {dim} of {self}; only dimension 0 in HBM",
        )
        need(self.dynamic is None, "pattern", f"a second dynamic index into {self}")
        _vector_index(vector_offset)
        return self._view(
            (vector_offset.shape[0],) + self.shape[1:],
            self.strides,
            dynamic=Dynamic("vector", vector_offset, self.strides[0] * self.itemsize),
        )

    def __getitem__(self, key: Any) -> NkiTensor:
        keys = list(key) if isinstance(key, tuple) else [key]
        if any(k is Ellipsis for k in keys):
            at = next(i for i, k in enumerate(keys) if k is Ellipsis)
            need(sum(k is Ellipsis for k in keys) == 1, "argument", "more than one Ellipsis")
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        if len(keys) > self.ndim:
            refuse("bounds", f"{len(keys)} indices into {self}")
        view, single = self, []
        for dim, k in enumerate(keys):
            start, end, step = _interval(k, self.shape[dim], dim, self)
            if isinstance(k, (int, np.integer)):
                single.append(dim)
            if (start, end, step) != (0, self.shape[dim], 1):
                view = view.slice(dim, start, end, step)
        for dim in reversed(single):
            if (view.ndim > 2 and dim > 0) if self.on_chip else view.ndim > 1:
                view = view._without(dim)
        return view

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        need(sorted(dims) == list(range(self.ndim)), "argument", f"permute {tuple(dims)} of {self}")
        need(
            not self._fixed_partition() or dims[0] == 0,
            "pattern",
            f"permute {tuple(dims)} moves the partition of {self}",
        )
        return self._view([self.shape[d] for d in dims], [self.strides[d] for d in dims])

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        dim = self._dimension(dim, "broadcast")
        need(self.shape[dim] == 1, "shape", f"broadcast of dimension {dim} of {self}: its size must be 1")
        need(dim > 0 or not self.on_chip, "pattern", f"broadcast over the partitions of {self}")
        return self._view(self.shape[:dim] + (size,) + self.shape[dim + 1 :], self.strides[:dim] + (0,) + self.strides[dim + 1 :])

    def expand_dim(self, dim: int) -> NkiTensor:
        need(0 <= dim <= self.ndim, "bounds", f"expand_dim at {dim} of {self}")
        need(dim > 0 or not self._fixed_partition(), "pattern", f"expand_dim before the partition of {self}")
        stride = self.strides[dim] * self.shape[dim] if dim < self.ndim else 1
        return self._view(self.shape[:dim] + (1,) + self.shape[dim:], self.strides[:dim] + (stride,) + self.strides[dim:])

    def squeeze_dim(self, dim: int) -> NkiTensor:
        dim = self._dimension(dim, "squeeze_dim")
        need(self.shape[dim] == 1, "shape", f"squeeze_dim {dim} of {self}: its size must be 1")
        need(dim > 0 or not self._fixed_partition(), "pattern", f"squeeze_dim of the partition of {self}")
        return self._without(dim)

    def reshape(self, shape: Sequence[int]) -> NkiTensor:
        shape = tuple(int(n) for n in shape)
        need(
            math.prod(shape) == self.size,
            "shape",
            f"reshape {self} to {shape}: {self.size} and {math.prod(shape)} elements",
        )
        keep = 1 if self._fixed_partition() else 0
        need(not keep or shape[:1] == self.shape[:1], "shape", f"reshape {self} to {shape} changes the partitions")
        strides = walk.reshape(self.shape[keep:], self.strides[keep:], shape[keep:])
        if strides is None:
            refuse("pattern", f"reshape {self} to {shape} would need a copy")
        return self._view(shape, self.strides[:keep] + strides)

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        dim = self._dimension(dim, "reshape_dim")
        need(sum(n == -1 for n in shape) <= 1, "argument", f"reshape_dim {tuple(shape)}: more than one -1")
        known = math.prod(n for n in shape if n != -1)
        sizes = tuple(self.shape[dim] // known if n == -1 else n for n in shape)
        need(math.prod(sizes) == self.shape[dim], "shape", f"reshape_dim {dim} of {self} to {tuple(shape)}")
        return self.reshape(self.shape[:dim] + sizes + self.shape[dim + 1 :])

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        first, last = self._dimension(start_dim, "flatten_dims"), self._dimension(end_dim, "flatten_dims")
        need(first <= last, "argument", f"flatten_dims {start_dim}..{end_dim} of {self}")
        return self.reshape(self.shape[:first] + (math.prod(self.shape[first : last + 1]),) + self.shape[last + 1 :])

    def rearrange(self, src_pattern: Sequence, dst_pattern: Sequence, fixed_sizes: dict[str, int] | None = None) -> NkiTensor:
        split, order, final = walk.rearrangement(self.shape, src_pattern, dst_pattern, fixed_sizes or {})
        return self.reshape(split).permute(order).reshape(final)

    def view(self, dtype: Any) -> NkiTensor:
        dtype = dtype_name(dtype)
        old, new = self.itemsize, ITEMSIZE[dtype]
        if old == new:
            return self._view(self.shape, self.strides, dtype=dtype)
        need(self.dynamic is None and self.indirection is None, "pattern", f"view of the indirect {self} as {dtype}")
        need(
            self.strides[-1] == 1 or self.shape[-1] == 1,
            "pattern",
            f"view of {self} as {dtype}: the last dimension is strided",
        )
        counts = (*self.strides[:-1], self.shape[-1], self.offset)
        need(all(c * old % new == 0 for c in counts), "pattern", f"view of {self} as {dtype}: sizes do not divide")
        *strides, last, offset = (c * old // new for c in counts)
        return self._view(self.shape[:-1] + (last,), (*strides, 1), offset, dtype=dtype)

    reinterpret_cast = view

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> NkiTensor:
        """An explicit access pattern. It addresses the storage; `offset` counts from the start of this view."""
        dtype = dtype_name(self.dtype if dtype is None else dtype)
        need(scalar_offset is None or vector_offset is None, "argument", "ap with both scalar_offset and vector_offset")
        dynamic = None
        if scalar_offset is not None or vector_offset is not None:
            need(self.dynamic is None, "pattern", f"a second dynamic index into {self}")
            scale = self.strides[self._dimension(indirect_dim, "ap")] * self.itemsize
            if vector_offset is not None:
                need(
                    not self.on_chip and indirect_dim == 0,
                    "pattern",
                    "vector_offset needs a tensor in HBM and indirect_dim=0",
                )
                dynamic = Dynamic("vector", _vector_index(vector_offset), scale)
            else:
                need(
                    not self.on_chip or indirect_dim > 0,
                    "pattern",
                    "scalar_offset cannot choose the partition of a tile on chip",
                )
                dynamic = Dynamic("scalar", _scalar_index(scalar_offset), scale)
        start = self.offset * self.itemsize // ITEMSIZE[dtype] + (offset or 0)
        view = self._view([p[1] for p in pattern], [p[0] for p in pattern], start, dtype=dtype, dynamic=dynamic, indirection=None)
        if self.on_chip and view.shape[0] > 1 and view.strides[0] != view.row_elements:
            refuse("pattern", f"ap: the partition stride {view.strides[0]} of {self} must be {view.row_elements}")
        return view if dynamic else check_bounds(view)

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        """Tensor indirection: columns of this tile chosen by offsets in `index`, in snake order."""
        need(self.on_chip, "memory", f"indirect view of {self}: the tile must be on chip")
        need(index.buffer is SBUF, "memory", f"indirect: the index {index} must be in SBUF")
        need(index.shape[0] == self.shape[0], "shape", f"indirect: {self} with index {index}")
        need(self.dynamic is None and self.indirection is None, "pattern", f"a second indirection of {self}")
        count = index.size if num_elem is None else num_elem
        return self._view((self.shape[0], count), (self.strides[0], 1), indirection=Indirection(self, index, count))


def check_bounds(t: NkiTensor) -> NkiTensor:
    """Refuse a view that leaves its storage, or on chip its partition."""
    low, high = walk.last_offset(t.shape, t.strides)
    if t.offset + low < 0 or (t.offset + high) * t.itemsize >= t.storage.total:
        refuse("bounds", f"{t} reaches element {t.offset + high} of a storage of {t.storage.total // t.itemsize}")
    if t.on_chip:
        low, high = walk.last_offset(t.shape[1:], t.strides[1:])
        column = t.offset % t.row_elements
        if column + low < 0 or column + high >= t.row_elements:
            refuse("bounds", f"{t} reaches element {column + high} of a partition of {t.row_elements}")
    return t


def _interval(key: Any, size: int, dim: int, t: NkiTensor) -> tuple[int, int, int]:
    """(start, end, step) that one index of t[...] means."""
    if isinstance(key, DynamicSlice):
        return key.start, key.start + key.size, 1
    if isinstance(key, (bool, NkiTensor, VirtualRegister)) or not isinstance(key, (int, np.integer, slice)):
        raise TypeError(f"index {key!r} into {t}: use ints, slices, nl.ds or Ellipsis; at run time .select or .ap(scalar_offset=)")
    if isinstance(key, slice):
        start, end = 0 if key.start is None else key.start, size if key.stop is None else key.stop
        return (
            (start + size if start < 0 else start),
            (end + size if end < 0 else end),
            1 if key.step is None else key.step,
        )
    index = int(key) + size if key < 0 else int(key)
    if not 0 <= index < size:
        refuse("bounds", f"index {key} in dimension {dim} of {t}")
    return index, index + 1, 1


def _scalar_index(index: Any) -> Any:
    if isinstance(index, VirtualRegister):
        return index
    if not isinstance(index, NkiTensor):
        raise TypeError(f"scalar_offset {index!r}: a (1, 1) tile in SBUF or a register; a constant goes into offset=")
    need(index.buffer is SBUF and index.size == 1, "shape", f"scalar_offset {index} must be one element in SBUF")
    need(
        index.dtype in ("int32", "uint32", "int16", "uint16", "int8", "uint8"),
        "dtype",
        f"scalar_offset {index} must be an integer",
    )
    return index


def _vector_index(index: NkiTensor) -> NkiTensor:
    if not isinstance(index, NkiTensor):
        raise TypeError(f"vector_offset {index!r} must be a tile")
    need(index.buffer is SBUF, "memory", f"vector_offset {index} must be in SBUF")
    need(index.dtype in ("int32", "uint32"), "dtype", f"vector_offset {index} must be int32 or uint32")
    return index


def is_hbm(buffer: Any) -> bool:
    return buffer in (HBM, SHARED)
