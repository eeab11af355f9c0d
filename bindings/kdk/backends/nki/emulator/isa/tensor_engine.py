"""TensorE: matrix multiplication into PSUM, and transposes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .. import access
from ..access import Usable
from ..blas import warn_if_threaded
from ..core import current
from ..cost.records import elementwise
from ..dtypes import FP8, is_float
from ..errors import call_site, need, refuse
from ..memory import MATMUL, PSUM, PSUM_BANK, SBUF, UNTOUCHED, WRITTEN
from ..tensor import NkiTensor
from . import enums
from .common import Instruction, choose, meet, member, need_generation
from .common import NkiInstruction as Handle

WIDE = {"float32", "tfloat32"}


def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: Any = (),
    tile_size: Any = (),
    perf_mode: Any = enums.matmul_perf_mode.none,
    name: str | None = None,
) -> Handle:
    """dst (+)= stationary.T @ moving, summed in float32; K is the partition dimension of both inputs."""
    n = "nc_matmul"
    member(perf_mode, enums.matmul_perf_mode, n)
    need(accumulate in (None, True, False), "argument", f"{n}: accumulate={accumulate!r}")
    double = perf_mode is enums.matmul_perf_mode.double_row
    ins = Instruction(n, "tensor", name)
    stationary = ins.tile(stationary, "stationary", (SBUF,), indirect=True)
    moving = ins.tile(moving, "moving", (SBUF,), indirect=not is_transpose)
    dst = ins.out(dst, "dst", (PSUM,), indirect=True)
    half = 2 if double else 1
    k, m, columns = stationary.partitions, stationary.per_partition // half, moving.per_partition // half
    if moving.partitions != k:
        refuse("shape", f"{n}: contraction over {k} partitions of stationary and {moving.partitions} of moving")
    generation = ins.core.generation
    _check_array(n, generation, k, m, columns, dst.itemsize, tuple(tile_position or ()), tuple(tile_size or ()), double)
    ins.fits(dst, m, columns, "dst, stationary.T @ moving,")
    _check_dtypes(n, generation, dst.dtype, stationary.dtype, moving.dtype, is_transpose, double)
    if stationary.dtype == moving.dtype == "float32" and not is_transpose:
        ins.core.lint("nc_matmul of float32 takes four passes; bfloat16 takes one", call_site())
    check_bank(n, dst)
    if double:
        need_generation(3, f"{n} with double_row")
        need(not is_transpose, "matmul", f"{n}: double_row with is_transpose")
        legal = stationary.ndim > 2 and moving.ndim > 2 and stationary.shape[1] == moving.shape[1] == 2
        need(legal, "matmul", f"{n}: double_row needs shapes (K, 2, M) and (K, 2, N)")
    if is_transpose:
        _transpose_by_matmul(ins, dst, stationary, moving)
    else:
        a, b = (ins.f32(stationary), ins.f32(moving)) if ins.data else (None, None)
        if double and ins.data:
            a, b = (v.reshape(k, 2, -1).transpose(1, 0, 2).reshape(2 * k, -1) for v in (a, b))  # type: ignore[union-attr]
        multiply_into(ins, dst, a, b, _product_usable(ins, stationary, moving, half), accumulate)
    return ins.done(
        _cycles(ins, m, columns, stationary, moving, is_transpose, is_stationary_onezero or is_moving_onezero),
        flops=2 * k * half * m * columns,
    )


@functools.cache  # the same few shapes and dtypes come thousands of times
def _check_array(n: str, generation: int, k: int, m: int, columns: int, itemsize: int, position: Any, size: Any, double: bool) -> None:
    """The systolic array: 128 x 128, or a tile of it."""
    need(bool(position) == bool(size), "matmul", f"{n}: tile_position {position} and tile_size {size} go together")
    rows, width = size or (128, 128)
    if size:
        least = 32 if generation >= 3 else 64
        legal = rows in (32, 64, 128) and width in (32, 64, 128) and min(rows, width) >= least
        need(legal, "matmul", f"{n}: tile_size {size}")
        fits = all(p % s == 0 and p >= 0 and p + s <= 128 for p, s in zip(position, size))
        need(fits, "matmul", f"{n}: tile_position {position} with tile_size {size}")
        need(not (double and width != 128), "matmul", f"{n}: double_row with column tiling")
    inside = k <= rows and m <= width
    need(inside, "matmul", f"{n}: stationary of {k} partitions by {m} in an array tile of {rows} by {width}")
    most = 512 if generation < 4 else 8192 if itemsize == 2 else 4096
    need(columns <= most, "matmul", f"{n}: moving free size {columns}, limit {most} on gen{generation}")


@functools.cache
def _check_dtypes(n: str, generation: int, dst: str, stationary: str, moving: str, is_transpose: bool, double: bool) -> None:
    kinds = {stationary, moving}
    legal = all(is_float(d) and d != "float8_e8m0fnu" for d in kinds)
    need(legal, "matmul", f"{n} of {stationary} and {moving}; operands must be float")
    legal = kinds <= WIDE or not kinds & WIDE
    need(legal, "matmul", f"{n} of {stationary} and {moving}: float32 goes with float32 only")
    if "float8_e4m3fn" in kinds:
        need(generation >= 4, "generation", f"{n} of float8_e4m3fn needs gen4, this is gen{generation}")
        need("float8_e4m3" not in kinds, "matmul", f"{n} mixes float8_e4m3 and float8_e4m3fn")
    need(not double or kinds <= set(FP8), "matmul", f"{n}: double_row of {sorted(kinds)}, must be float8")
    if is_transpose:
        need(dst == stationary, "matmul", f"{n} with is_transpose of {stationary} into {dst}; dtypes must be equal")
    else:
        legal = dst == "float32" or (generation >= 4 and dst == "bfloat16")
        need(legal, "matmul", f"{n} into {dst}; dst must be float32 (gen4: or bfloat16)")


def check_bank(n: str, dst: NkiTensor) -> None:
    """Before gen4 the result must not cross a PSUM bank."""
    if current().generation >= 4:
        return
    low = dst.storage.base % dst.storage.pitch + dst.offset % dst.row_elements * dst.itemsize
    high = low + sum((c - 1) * s for c, s in zip(dst.shape[1:], dst.strides[1:])) * dst.itemsize
    if low // PSUM_BANK != high // PSUM_BANK:
        refuse("matmul", f"{n}: dst reaches from PSUM bank {low // PSUM_BANK} to {high // PSUM_BANK}")


def _product_usable(ins: Instruction, stationary: NkiTensor, moving: NkiTensor, half: int) -> Usable:
    """A column of either input with an unusable element makes a row or column of the product unusable."""
    left, right = ins.usable(stationary), ins.usable(moving)
    if left is True and right is True:
        return True

    def columns(fine: Usable, t: NkiTensor) -> np.ndarray:
        count = t.per_partition // half
        if fine is True:
            return np.ones(count, bool)
        wide = np.broadcast_to(fine, (t.partitions, t.per_partition)).reshape(t.partitions, half, count)
        return np.asarray(wide.all((0, 1)))

    return np.logical_and(columns(left, stationary)[:, None], columns(right, moving)[None, :])


def multiply_into(ins: Instruction, dst: NkiTensor, a: Any, b: Any, fine: Usable, accumulate: bool | None) -> None:
    """Write or add a.T @ b, by who wrote each element of PSUM before."""
    x = None
    if ins.data:
        warn_if_threaded()
        with np.errstate(all="ignore"):
            x = a.T @ b
    if accumulate is False:
        ins.put(dst, x, fine, writer=MATMUL)
        return
    writer = access.last_writer(dst)
    fresh = writer == UNTOUCHED
    if accumulate is True and fresh.any():
        refuse("accumulate", f"{ins.op}: accumulate=True on PSUM that nothing wrote")
    if not fresh.all():
        _check_group(ins, dst, writer, accumulate)
        before = ins.usable(dst)
        if before is not True:
            fine = meet(fine, before | fresh)
        if x is not None:
            total = x + ins.f32(dst)
            x = np.where(fresh, x, total) if fresh.any() else total
    ins.put(dst, x, fine, writer=MATMUL)


def _check_group(ins: Instruction, dst: NkiTensor, writer: np.ndarray, accumulate: bool | None) -> None:
    """Adding to what another instruction wrote is undefined before gen4.

    With accumulate=None the documents say both that the first matmul overwrites and that this is undefined. Public
    kernels clear PSUM and then accumulate, so content that is zero is accepted: both readings agree on it.
    """
    other = writer == WRITTEN
    if ins.core.generation >= 4 or not other.any():
        return
    zero = accumulate is None and ins.data and not ins.f32(dst)[np.broadcast_to(other, (dst.partitions, dst.per_partition))].any()
    if not zero and (ins.data or accumulate):
        refuse("accumulate", f"{ins.op} adds to PSUM content that another instruction wrote")


def _transpose_by_matmul(ins: Instruction, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor) -> None:
    """is_transpose moves bits: dst = stationary.T, its columns ordered by the permutation in moving."""
    fine = ins.usable(stationary)
    need(ins.usable(moving) is True, "uninitialised", f"{ins.op}: the identity {moving} was not written")
    if not ins.data:
        ins.put(dst, None, fine if fine is True else np.asarray(fine).T[:, : moving.per_partition], writer=MATMUL)
        return
    hot = ins.f32(moving)
    legal = ((hot != 0).sum(0) == 1).all() and (hot[hot != 0] == 1).all()
    need(legal, "matmul", f"{ins.op}: is_transpose needs an identity or permutation as moving")
    order = hot.argmax(0)
    ins.put(
        dst,
        ins.raw(stationary).T[:, order],
        fine if fine is True else np.asarray(fine).T[:, order],
        writer=MATMUL,
        raw=True,
    )


def _cycles(ins: Instruction, m: int, columns: int, stationary: NkiTensor, moving: NkiTensor, is_transpose: bool, hint: bool) -> float:
    passes = 1
    if stationary.dtype == moving.dtype == "float32" and not is_transpose:
        passes = 2 if hint else 4
    return max(min(64, m), columns) * passes


def nc_transpose(dst: NkiTensor, data: NkiTensor, engine: Any = enums.engine.unknown, name: str | None = None) -> Handle:
    """dst = data.T with the free dimensions flattened; on TensorE into PSUM, on VectorE up to 32 by 32."""
    n = "nc_transpose"
    for t, what in ((dst, "dst"), (data, "data")):
        if not isinstance(t, NkiTensor):
            raise TypeError(f"{n}: {what} must be a tensor, not {type(t).__name__}")
    default = "tensor" if dst.buffer is PSUM and data.buffer is SBUF else "vector"
    ins = Instruction(n, choose(engine, ("tensor", "vector"), default, n), name)
    on_tensor = ins.engine == "tensor"
    dst = ins.out(dst, "dst", (PSUM,) if on_tensor else (SBUF, PSUM))
    data = ins.tile(data, "data", (SBUF,) if on_tensor else (SBUF, PSUM))
    most = 128 if on_tensor else 32
    legal = data.partitions <= most and data.per_partition <= most
    need(legal, "limit", f"{n} of {data.partitions} by {data.per_partition} on {ins.engine}, limit {most} by {most}")
    ins.fits(dst, data.per_partition, data.partitions, f"dst of {list(data.shape)}")
    need(dst.dtype == data.dtype, "dtype", f"{n} {data.dtype} into {dst.dtype}")
    if on_tensor:
        check_bank(n, dst)
    fine = ins.usable(data)
    ins.put(
        dst,
        ins.raw(data).T.copy() if ins.data else None,
        fine if fine is True else np.asarray(fine).T,
        writer=MATMUL if on_tensor else WRITTEN,
        raw=True,
    )
    cycles = max(data.partitions, min(64, data.per_partition)) if on_tensor else elementwise(data.per_partition)
    return ins.done(cycles)
