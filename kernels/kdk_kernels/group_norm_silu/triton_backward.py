"""group_norm_silu, backward, in Triton: one launch where a group is a program's (see the forward), three where it is longer: sums
of tiles, their combination over a group, and a pass that writes dx.

The sums of a channel over its pixels are at once the shares of dweight and dbias; weighted and added up over a group they are the
two means that dx needs. Without dx the sums of tiles are all there is.
"""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdk.layouts import format_of
from kdk_kernels.group_norm_silu.triton import PARTS, images, place, tile, whole
from kdk_kernels.group_norm_silu.triton import TUNABLE as TUNABLE

WARPS = 8


@triton.jit
def _tile(
    grad, x, weight, bias, mean, rstd, n, c, p, end, channels, P, G, g_n, g_c, g_p, x_n, x_c, x_p, w_c, b_c,
):  # fmt: skip
    """Of a tile the normalised x, the gradient of what SiLU was taken of (0 from channel `end` and pixel P on), the weight and rstd.

    channels: of a group.
    """
    inside = c < end
    group = n * G + c // channels
    centre, scale = tl.load(mean + group, mask=inside, other=0.0), tl.load(rstd + group, mask=inside, other=0.0)
    w = tl.load(weight + c * w_c, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + c * b_c, mask=inside, other=0.0).to(tl.float32)
    mask = inside & (p < P)
    g = tl.load(grad + n * g_n + c * g_c + p * g_p, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(x + n * x_n + c * x_c + p * x_p, mask=mask, other=0.0).to(tl.float32)
    normalised = (values - centre) * scale
    z = normalised * w + b
    # 1 - sigmoid would lose the small values that z multiplies.
    dz = g * ((1.0 + z / (1.0 + tl.exp(z))) / (1.0 + tl.exp(-z)))
    return tl.where(mask, normalised, 0.0), tl.where(mask, dz, 0.0), w, scale


@triton.jit
def _group(
    grad, x, weight, bias, mean, rstd, of_bias, of_weight, dx, channels, P, G,
    g_n, g_c, g_p, x_n, x_c, x_p, w_c, b_c, d_n, d_c, d_p, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Of a whole group the sums of its channels, and dx."""
    n, begin = (tl.program_id(0) // G).to(tl.int64), (tl.program_id(0) % G).to(tl.int64) * channels
    end = begin + channels
    rows, columns = tl.arange(0, CHANNELS)[:, None].to(tl.int64), tl.arange(0, PIXELS)[None, :].to(tl.int64)
    first = tl.zeros((1, 1), tl.float32)
    second = first
    for start in range(begin, end, CHANNELS):
        c = start + rows
        in_bias = tl.zeros((CHANNELS, 1), tl.float32)
        in_weight = in_bias
        w = tl.load(weight + c * w_c, mask=c < end, other=0.0).to(tl.float32)
        for at in range(0, P, PIXELS):
            normalised, dz, _, _ = _tile(
                grad, x, weight, bias, mean, rstd, n, c, at + columns, end, channels, P, G, g_n, g_c, g_p, x_n, x_c, x_p, w_c, b_c
            )
            in_bias += tl.sum(dz, axis=1, keep_dims=True)
            in_weight += tl.sum(dz * normalised, axis=1, keep_dims=True)
        to = n * G * channels + c
        tl.store(of_bias + to, in_bias, mask=c < end)
        tl.store(of_weight + to, in_weight, mask=c < end)
        first += tl.sum(w * in_bias, axis=0, keep_dims=True)
        second += tl.sum(w * in_weight, axis=0, keep_dims=True)
    size = channels * P
    first, second = first / size, second / size
    for start in range(begin, end, CHANNELS):
        c = start + rows
        for at in range(0, P, PIXELS):
            p = at + columns
            normalised, dz, w, scale = _tile(
                grad, x, weight, bias, mean, rstd, n, c, p, end, channels, P, G, g_n, g_c, g_p, x_n, x_c, x_p, w_c, b_c
            )
            result = (dz * w - first - normalised * second) * scale
            tl.store(dx + n * d_n + c * d_c + p * d_p, result.to(dx.dtype.element_ty), mask=(c < end) & (p < P))


@triton.jit
def _sums(
    grad, x, weight, bias, mean, rstd, of_bias, of_weight, C, P, G, g_n, g_c, g_p, x_n, x_c, x_p, w_c, b_c,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    n, c, block, p = place(C, P, CHANNELS, PIXELS)
    normalised, dz, _, _ = _tile(grad, x, weight, bias, mean, rstd, n, c, p, C, C // G, P, G, g_n, g_c, g_p, x_n, x_c, x_p, w_c, b_c)
    at = (n * C + c) * tl.cdiv(P, PIXELS) + block
    tl.store(of_bias + at, tl.sum(dz, axis=1, keep_dims=True), mask=c < C)
    tl.store(of_weight + at, tl.sum(dz * normalised, axis=1, keep_dims=True), mask=c < C)


@triton.jit
def _means(of_bias, of_weight, weight, means, parts, blocks, size, G, channels, w_c, PARTS: tl.constexpr):
    """Of a group the means of g and of g * n (see the reference), side by side. channels: of a group."""
    group, lane = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    first = tl.zeros((PARTS,), tl.float32)
    second = tl.zeros((PARTS,), tl.float32)
    for start in range(0, parts, PARTS):
        i = start + lane
        w = tl.load(weight + (group % G * channels + i // blocks) * w_c, mask=i < parts, other=0.0).to(tl.float32)
        first += w * tl.load(of_bias + group * parts + i, mask=i < parts, other=0.0)
        second += w * tl.load(of_weight + group * parts + i, mask=i < parts, other=0.0)
    tl.store(means + group * 2, tl.sum(first, axis=0) / size)
    tl.store(means + group * 2 + 1, tl.sum(second, axis=0) / size)


@triton.jit
def _of_x(
    grad, x, weight, bias, mean, rstd, means, dx, C, P, G, g_n, g_c, g_p, x_n, x_c, x_p, w_c, b_c, d_n, d_c, d_p,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    n, c, _, p = place(C, P, CHANNELS, PIXELS)
    normalised, dz, w, scale = _tile(grad, x, weight, bias, mean, rstd, n, c, p, C, C // G, P, G, g_n, g_c, g_p, x_n, x_c, x_p, w_c, b_c)
    at = means + (n * G + c // (C // G)) * 2
    first, second = tl.load(at, mask=c < C), tl.load(at + 1, mask=c < C)
    result = (dz * w - first - normalised * second) * scale
    tl.store(dx + n * d_n + c * d_c + p * d_p, result.to(dx.dtype.element_ty), mask=(c < C) & (p < P))


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, needs: str,
    *, elements: Optional[int] = None, parts: Optional[int] = None,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    needed = needs.split(",")
    dx: Optional[Tensor] = None
    if "x" in needed:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=format_of(grad))
    grad, x, groups = images(grad), images(x), mean.shape[1]
    N, C, P = x.shape
    inputs = grad, x, weight, bias, mean.contiguous(), rstd.contiguous()
    strides = (*grad.stride(), *x.stride(), weight.stride(0), bias.stride(0))
    one = whole(x, groups, elements) if dx is not None else {}  # without dx, more programs share the sums
    shape, tiles = tile(x, elements)
    blocks = 1 if one else triton.cdiv(P, shape["PIXELS"])
    of_bias, of_weight = (torch.empty((N, C, blocks), dtype=torch.float32, device=x.device) for _ in range(2))
    if dx is not None and one:
        out = dx.view(N, C, P)
        _group[(N * groups,)](*inputs, of_bias, of_weight, out, C // groups, P, groups, *strides, *out.stride(), **one)
    else:
        _sums[(tiles,)](*inputs, of_bias, of_weight, C, P, groups, *strides, **shape, num_warps=WARPS)
    if dx is not None and not one:
        means = torch.empty((N, groups, 2), dtype=torch.float32, device=x.device)
        out, of_group = dx.view(N, C, P), C // groups * blocks
        _means[(N * groups,)](
            of_bias, of_weight, weight, means, of_group, blocks, C // groups * P, groups, C // groups, weight.stride(0),
            PARTS=min(parts or PARTS, triton.next_power_of_2(of_group)),
        )  # fmt: skip
        _of_x[(tiles,)](*inputs, means, out, C, P, groups, *strides, *out.stride(), **shape, num_warps=WARPS)
    of_channel = [t.sum((0, 2)) if name in needed else None for name, t in (("weight", of_weight), ("bias", of_bias))]
    dweight, dbias = (None if t is None else t.to(like.dtype) for t, like in zip(of_channel, (weight, bias)))
    return dx, dweight, dbias
