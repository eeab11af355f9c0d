"""group_norm_silu, forward, in Triton: one launch where a group is a program's, three where it is longer.

A tile is some channels and pixels of one image: wide along whichever lies side by side in memory, so NCHW and channels-last are
read as they are. Of every tile the sum and the squares about its own mean are found, and those of a group put together by Chan's
formula, so neither a long group nor a large mean costs digits.

In NCHW a program takes a whole group of up to `WHOLE` elements: a single tile stays in registers, more tiles are read again, from
the second-level cache while the groups that are read at once fit it. Of longer groups, and of channels-last, where the channels of
several groups lie side by side, many programs share the work: sums of tiles, their combination, and a pass that reads x again.
"""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdk.layouts import format_of

TILE, CHANNELS_SIDE_BY_SIDE = 4096, 64  # elements of a tile; its channels where these are what lies side by side
WHOLE, WHOLE_TILE, MOST_WARPS = 1 << 18, 1 << 13, 16  # elements of a group that is one program's, and of its tile: 16 a thread
PARTS = 1024  # of a group that are put together at once
TUNABLE = {"elements": (512, 2048, 4096, 8192, 16384), "parts": (16, 256, 1024)}  # of a tile; of a group, put together at once
WARPS = 4


@triton.jit
def place(C, P, CHANNELS: tl.constexpr, PIXELS: tl.constexpr):
    """Of a program's tile the image, channels (a column), block of pixels, pixels (a row)."""
    blocks, channel_blocks = tl.cdiv(P, PIXELS), tl.cdiv(C, CHANNELS)
    program = tl.program_id(0)
    block, rest = program % blocks, program // blocks
    c = (rest % channel_blocks).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    p = block.to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[None, :]
    return (rest // channel_blocks).to(tl.int64), c, block, p


@triton.jit
def _together(values):
    return tl.sum(tl.sum(values, axis=1, keep_dims=True), axis=0, keep_dims=True)


@triton.jit
def _silu(values, weight, bias, c, inside, w_c, b_c, centre, scale):
    """SiLU of a tile, normalised."""
    w = tl.load(weight + c * w_c, mask=inside).to(tl.float32)
    b = tl.load(bias + c * b_c, mask=inside).to(tl.float32)
    z = (values - centre) * scale * w + b
    return z / (1.0 + tl.exp(-z))


@triton.jit
def _group(
    x, weight, bias, y, mean, rstd, channels, P, G, eps, x_n, x_c, x_p, y_n, y_c, y_p, w_c, b_c,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """A whole group. channels: its own; ONE: a single tile holds it."""
    n, first = (tl.program_id(0) // G).to(tl.int64), (tl.program_id(0) % G).to(tl.int64) * channels
    x += n * x_n + first * x_c
    y += n * y_n + first * y_c
    weight += first * w_c
    bias += first * b_c
    of_channels, of_pixels = tl.arange(0, CHANNELS)[:, None].to(tl.int64), tl.arange(0, PIXELS)[None, :].to(tl.int64)
    seen = tl.zeros((1, 1), tl.float32)
    centre, spread = seen, seen
    for start in range(0, channels, CHANNELS):
        c = start + of_channels
        for begin in range(0, P, PIXELS):
            p = begin + of_pixels
            mask = (c < channels) & (p < P)
            values = tl.load(x + c * x_c + p * x_p, mask=mask, other=0.0).to(tl.float32)
            size = (tl.minimum(CHANNELS, channels - start) * tl.minimum(PIXELS, P - begin)).to(tl.float32)
            own = _together(values) / size
            centred = tl.where(mask, values - own, 0.0)
            off, share = own - centre, size / (seen + size)
            spread += _together(centred * centred) + off * (off * (seen * share))
            centre += off * share
            seen += size
    scale = 1.0 / tl.sqrt_rn(spread / seen + eps)
    one = tl.arange(0, 1)[:, None]
    tl.store(mean + tl.program_id(0) + one, centre)
    tl.store(rstd + tl.program_id(0) + one, scale)
    if ONE:
        result = _silu(values, weight, bias, c, c < channels, w_c, b_c, centre, scale)
        tl.store(y + c * y_c + p * y_p, result.to(y.dtype.element_ty), mask=mask)
    else:
        for start in range(0, channels, CHANNELS):
            c = start + of_channels
            for begin in range(0, P, PIXELS):
                p = begin + of_pixels
                mask = (c < channels) & (p < P)
                values = tl.load(x + c * x_c + p * x_p, mask=mask).to(tl.float32)
                result = _silu(values, weight, bias, c, c < channels, w_c, b_c, centre, scale)
                tl.store(y + c * y_c + p * y_p, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _sums(x, sums, squares, C, P, x_n, x_c, x_p, CHANNELS: tl.constexpr, PIXELS: tl.constexpr):
    n, c, block, p = place(C, P, CHANNELS, PIXELS)
    mask = (c < C) & (p < P)
    values = tl.load(x + n * x_n + c * x_c + p * x_p, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(values, axis=1, keep_dims=True)
    centred = tl.where(mask, values - total / tl.minimum(PIXELS, P - block * PIXELS), 0.0)
    at = (n * C + c) * tl.cdiv(P, PIXELS) + block
    tl.store(sums + at, total, mask=c < C)
    tl.store(squares + at, tl.sum(centred * centred, axis=1, keep_dims=True), mask=c < C)


@triton.jit
def _statistics(sums, squares, mean, rstd, parts, P, size, eps, PIXELS: tl.constexpr, PARTS: tl.constexpr):
    """A group's mean and rstd, from the sums of its parts. size: its elements."""
    group, lane = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    blocks = tl.cdiv(P, PIXELS)
    total = tl.zeros((PARTS,), tl.float32)
    for start in range(0, parts, PARTS):
        i = start + lane
        total += tl.load(sums + group * parts + i, mask=i < parts, other=0.0)
    centre = tl.sum(total, axis=0) / size
    spread = tl.zeros((PARTS,), tl.float32)
    for start in range(0, parts, PARTS):
        i = start + lane
        count = tl.minimum(PIXELS, P - i % blocks * PIXELS).to(tl.float32)
        off = tl.load(sums + group * parts + i, mask=i < parts, other=0.0) / count - centre
        own = tl.load(squares + group * parts + i, mask=i < parts, other=0.0)
        spread += tl.where(i < parts, own + count * off * off, 0.0)
    tl.store(mean + group, centre)
    tl.store(rstd + group, 1.0 / tl.sqrt_rn(tl.sum(spread, axis=0) / size + eps))


@triton.jit
def _normalise(
    x, weight, bias, mean, rstd, y, C, P, G, x_n, x_c, x_p, y_n, y_c, y_p, w_c, b_c,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    n, c, _, p = place(C, P, CHANNELS, PIXELS)
    inside = c < C
    group = n * G + c // (C // G)
    centre, scale = tl.load(mean + group, mask=inside), tl.load(rstd + group, mask=inside)
    mask = inside & (p < P)
    values = tl.load(x + n * x_n + c * x_c + p * x_p, mask=mask).to(tl.float32)
    result = _silu(values, weight, bias, c, inside, w_c, b_c, centre, scale)
    tl.store(y + n * y_n + c * y_c + p * y_p, result.to(y.dtype.element_ty), mask=mask)


def images(t: Tensor) -> Tensor:
    """(N, C, ...) -> (N, C, P): a view, unless the pixels have no common stride."""
    return t.reshape(*t.shape[:2], t.shape[2:].numel())


def whole(x: Tensor, groups: int, elements: Optional[int]) -> dict[str, int]:
    """Channels and pixels of a tile of x (N, C, P), and warps, where a program takes a group; empty where it does not."""
    channels, P = x.shape[1] // groups, x.shape[2]
    if channels_side_by_side(x) or channels * P > WHOLE:
        return {}
    most = elements or WHOLE_TILE
    pixels = min(triton.next_power_of_2(P), most)
    rows = min(triton.next_power_of_2(channels), most // pixels)
    warps = max(1, min(MOST_WARPS, pixels * rows * MOST_WARPS // WHOLE_TILE))
    return {"CHANNELS": rows, "PIXELS": pixels, "num_warps": warps}


def channels_side_by_side(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(2) != 1


def tile(x: Tensor, elements: Optional[int]) -> tuple[dict[str, int], int]:
    """Channels and pixels of a program's tile of x (N, C, P), and how many tiles there are."""
    N, C, P = x.shape
    most = elements or TILE
    if channels_side_by_side(x):
        channels = min(triton.next_power_of_2(C), CHANNELS_SIDE_BY_SIDE)
        pixels = min(triton.next_power_of_2(P), most // channels)
    else:
        pixels = min(triton.next_power_of_2(P), most)
        channels = min(triton.next_power_of_2(C), most // pixels)
    return {"CHANNELS": channels, "PIXELS": pixels}, N * triton.cdiv(C, channels) * triton.cdiv(P, pixels)


def forward(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float,
    *, elements: Optional[int] = None, parts: Optional[int] = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=format_of(x))
    out, x = y.view(*x.shape[:2], -1), images(x)
    N, C, P = x.shape
    mean, rstd = (torch.empty((N, groups), dtype=torch.float32, device=x.device) for _ in range(2))
    one = whole(x, groups, elements)
    if one:
        held = one["CHANNELS"] * groups >= C and one["PIXELS"] >= P
        _group[(N * groups,)](
            x, weight, bias, out, mean, rstd, C // groups, P, groups, eps, *x.stride(), *out.stride(), weight.stride(0),
            bias.stride(0), ONE=held, **one,
        )  # fmt: skip
        return y, mean, rstd
    shape, tiles = tile(x, elements)
    of_group = C // groups * triton.cdiv(P, shape["PIXELS"])
    sums, squares = (torch.empty((N * groups, of_group), dtype=torch.float32, device=x.device) for _ in range(2))
    _sums[(tiles,)](x, sums, squares, C, P, *x.stride(), **shape, num_warps=WARPS)
    _statistics[(N * groups,)](
        sums, squares, mean, rstd, of_group, P, C // groups * P, eps,
        PIXELS=shape["PIXELS"], PARTS=min(parts or PARTS, triton.next_power_of_2(of_group)),
    )  # fmt: skip
    _normalise[(tiles,)](
        x, weight, bias, mean, rstd, out, C, P, groups, *x.stride(), *out.stride(), weight.stride(0), bias.stride(0),
        **shape, num_warps=WARPS,
    )  # fmt: skip
    return y, mean, rstd
