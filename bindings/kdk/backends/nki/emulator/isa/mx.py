"""MX block scaling (gen4): quantisation on VectorE and matrix products on TensorE.

A group of 32 values, 8 partitions by 4 elements, shares one scale, a power of two stored as its exponent plus 127.
The scale of group g of partitions lies in partition 32 * (g // 4) + g % 4 of the scale tile, in the quadrant of its data.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import access
from ..access import Usable
from ..cost.records import elementwise
from ..dtypes import NUMPY, PACKED
from ..errors import need
from ..memory import PSUM, SBUF, WRITTEN
from ..tensor import NkiTensor
from .common import Instruction, meet, need_generation
from .common import NkiInstruction as Handle
from .tensor_engine import multiply_into

GROUP_PARTITIONS, GROUP_ELEMENTS = 8, 4
SCALE_BIAS = 127
LARGEST_EXPONENT = {"float8_e4m3fn_x4": 8, "float8_e5m2_x4": 15}
SCALE_DTYPES = ("float8_e8m0fnu", "uint8")


def unpack(x: np.ndarray, dtype: str) -> np.ndarray:
    """(P, N) packed elements as (P, N, 4) float32 values."""
    element = PACKED[dtype]
    if dtype == "float4_e2m1fn_x4":
        nibbles = np.stack([(x >> np.uint16(4 * i)) & np.uint16(15) for i in range(4)], -1).astype(np.uint8)
        return nibbles.view(element).astype(np.float32)
    return np.ascontiguousarray(x).view(element).reshape(*x.shape, 4).astype(np.float32)


def pack(values: np.ndarray, dtype: str) -> np.ndarray:
    """(P, N, 4) float32 values, already scaled, as (P, N) packed 8-bit elements."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(values.astype(PACKED[dtype])).view(NUMPY[dtype])[..., 0]


def scale_rows(partitions: int) -> np.ndarray:
    """Rows of the scale tile that hold the scales of the groups of partitions."""
    groups = np.arange(partitions // GROUP_PARTITIONS)
    return groups // 4 * 32 + groups % 4


def _check_scale(ins: Instruction, scale: Any, data: NkiTensor, columns: int, what: str, output: bool = False) -> NkiTensor:
    scale = ins.tile(scale, what, (SBUF,), output=output, any_start=True)
    need(scale.dtype in SCALE_DTYPES, "dtype", f"{ins.op}: {what} is {scale.dtype}, must be float8_e8m0fnu or uint8")
    rows = int(scale_rows(data.partitions)[-1]) + 1
    need(scale.partitions >= rows, "shape", f"{ins.op}: {what} has {scale.partitions} partitions, at least {rows}")
    need(scale.per_partition == columns, "shape", f"{ins.op}: {what} has {scale.per_partition} elements, expected {columns}")
    offset = scale.start_partition % 32
    need(offset in (0, 4, 8, 12), "start-partition", f"{ins.op}: {what} starts at partition {offset} of a quadrant; 0, 4, 8 or 12")
    return scale


def quantize_mx(dst: NkiTensor, src: NkiTensor, dst_scale: NkiTensor, name: str | None = None) -> Handle:
    """dst = src / scale as packed float8, with scale = 2 ** (floor(log2(largest of the group)) - (Emax - 1))."""
    n = "quantize_mx"
    need_generation(4, n)
    ins = Instruction(n, "vector", name)
    src, dst = ins.tile(src, "src", (SBUF,)), ins.out(dst, "dst", (SBUF,), packed=True)
    need(src.dtype in ("float16", "bfloat16"), "dtype", f"{n}: src is {src.dtype}, must be float16 or bfloat16")
    need(dst.dtype in LARGEST_EXPONENT, "dtype", f"{n}: dst is {dst.dtype}, must be one of {', '.join(LARGEST_EXPONENT)}")
    partitions, elements = src.partitions, src.per_partition
    legal = partitions % 32 == 0 and elements % GROUP_ELEMENTS == 0
    need(legal, "limit", f"{n} of {partitions} partitions (multiple of 32) by {elements} elements (multiple of 4)")
    ins.fits(dst, partitions, elements // GROUP_ELEMENTS, "dst")
    scale = _check_scale(ins, dst_scale, src, elements // GROUP_ELEMENTS, "dst_scale", output=True)
    fine = ins.usable(src)
    if fine is not True:
        fine = np.asarray(fine).reshape(partitions // 8, 8, -1, GROUP_ELEMENTS).all((1, 3))
    packed = codes = None
    if ins.data:
        packed, codes = _quantize(ins.f32(src), dst.dtype)
    ins.put(dst, packed, fine if fine is True else np.repeat(fine, GROUP_PARTITIONS, 0), raw=True)
    _put_scales(ins, scale, codes, fine, scale_rows(partitions))
    return ins.done(elementwise(elements, factor=0.25))


def _quantize(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Packed values (P, N / 4) and scale codes (P / 8, N / 4)."""
    groups = x.reshape(len(x) // GROUP_PARTITIONS, GROUP_PARTITIONS, -1, GROUP_ELEMENTS)
    largest = np.abs(groups).max((1, 3))
    exponent = np.frexp(largest)[1] - 1 - (LARGEST_EXPONENT[dtype] - 1)
    codes = np.where(largest == 0, 0, np.clip(exponent + SCALE_BIAS, 0, 254)).astype(np.uint8)
    scaled = np.ldexp(groups, SCALE_BIAS - codes.astype(np.int32)[:, None, :, None])
    return pack(scaled.reshape(len(x), -1, GROUP_ELEMENTS), dtype), codes


def _put_scales(ins: Instruction, scale: NkiTensor, codes: Any, fine: Usable, rows: np.ndarray) -> None:
    """Only the rows that hold scales are written; the others keep what they had."""
    for quadrant in range(0, len(rows), 4):
        first = int(rows[quadrant])
        count = min(4, len(rows) - quadrant)
        part = scale.slice(0, first, first + count)
        states = fine if fine is True else np.asarray(fine)[quadrant : quadrant + count].reshape(part.shape)
        if codes is not None:
            access.array(part)[...] = codes[quadrant : quadrant + count].view(NUMPY[part.dtype]).reshape(part.shape)
        access.mark(part, states, WRITTEN, ins.poison)


def nc_matmul_mx(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    stationary_scale: NkiTensor,
    moving_scale: NkiTensor,
    tile_position: Any = None,
    tile_size: Any = None,
    accumulate: bool | None = None,
    name: str | None = None,
) -> Handle:
    """dst (+)= (stationary * its scales).T @ (moving * its scales), contracting partitions and the packed elements."""
    n = "nc_matmul_mx"
    need_generation(4, n)
    need(accumulate in (None, True, False), "argument", f"{n}: accumulate={accumulate!r}")
    ins = Instruction(n, "tensor", name)
    stationary = ins.tile(stationary, "stationary", (SBUF,), packed=True)
    moving = ins.tile(moving, "moving", (SBUF,), packed=True)
    dst = ins.out(dst, "dst", (PSUM,))
    k, m, columns = stationary.partitions, stationary.per_partition, moving.per_partition
    for t, what in ((stationary, "stationary"), (moving, "moving")):
        need(t.dtype in PACKED, "dtype", f"{n}: {what} is {t.dtype}, must be packed (x4)")
    need(moving.partitions == k, "shape", f"{n}: contraction over {k} partitions of stationary and {moving.partitions} of moving")
    need(k % 32 == 0, "matmul", f"{n}: {k} partitions, must be a multiple of 32")
    need(m % 2 == 0 and m <= 128, "matmul", f"{n}: stationary of {m} columns, must be even and at most 128")
    need(dst.dtype in ("float32", "bfloat16"), "matmul", f"{n} into {dst.dtype}, must be float32 or bfloat16")
    most = 4096 if dst.dtype == "float32" else 8192
    need(columns <= most, "matmul", f"{n}: moving free size {columns}, limit {most}")
    ins.fits(dst, m, columns, "dst")
    _check_row_tile(n, k, tile_position, tile_size)
    scales = (
        _check_scale(ins, stationary_scale, stationary, m, "stationary_scale"),
        _check_scale(ins, moving_scale, moving, columns, "moving_scale"),
    )
    (a, left), (b, right) = (_dequantize(ins, t, s) for t, s in zip((stationary, moving), scales))
    fine: Usable = True
    if left is not True or right is not True:
        columns_left: Any = np.ones(m, bool) if left is True else np.broadcast_to(left, (k, m)).all(0)
        columns_right: Any = np.ones(columns, bool) if right is True else np.broadcast_to(right, (k, columns)).all(0)
        fine = np.logical_and(columns_left[:, None], columns_right[None, :])
    multiply_into(ins, dst, a, b, fine, accumulate)
    return ins.done(max(min(64, m), columns), flops=2 * 4 * k * m * columns)


def _check_row_tile(n: str, k: int, position: Any, size: Any) -> None:
    need(bool(position) == bool(size), "matmul", f"{n}: tile_position {position} and tile_size {size} go together")
    rows, width = size or (128, 128)
    start, column = position or (0, 0)
    legal = rows in (32, 64, 128) and width == 128 and start % rows == 0 and start + rows <= 128 and column == 0
    need(legal and k <= rows, "matmul", f"{n}: {k} partitions in tile_position {position}, tile_size {size}; rows only")


def _dequantize(ins: Instruction, t: NkiTensor, scale: NkiTensor) -> tuple[Any, Usable]:
    """Values as (4 K, N) float32 with the packed elements next to their partition, and which are usable."""
    rows = scale_rows(t.partitions)
    known, scale_known = ins.usable(t), ins.usable(scale)
    if scale_known is not True:
        picked = np.asarray(scale_known)[rows]
        scale_known = True if picked.all() else np.repeat(picked, GROUP_PARTITIONS, 0)
    fine = meet(known, scale_known)
    if not ins.data:
        return None, fine
    codes = ins.raw(scale)[rows].view(np.uint8).astype(np.int32)
    factors = np.where(codes == 255, np.float32(np.nan), np.ldexp(np.float32(1), codes - SCALE_BIAS)).astype(np.float32)
    values = unpack(ins.raw(t), t.dtype) * np.repeat(factors, GROUP_PARTITIONS, 0)[..., None]
    return values.transpose(0, 2, 1).reshape(4 * t.partitions, -1), fine
