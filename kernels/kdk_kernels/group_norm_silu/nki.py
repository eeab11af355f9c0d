"""group_norm_silu, forward, in NKI: a row per image and channel, 128 rows at a time on the partitions, pixels in tiles.

VectorE's bn_stats gives count, mean and squares of 512 pixels, bn_aggr puts any number of them together, and so also those of a
group's channels: these lie on other partitions, so three numbers per row go through HBM and come back side by side. A second pass
over x normalises on VectorE and takes silu of n * weight + bias on ScalarE, in one instruction.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run
from kdk.layouts import format_of

ROWS = 128
TILE = 4096  # pixels that are fetched at once
STATS = 512  # elements of one bn_stats
MOST_PIXELS = 1 << 24  # three numbers of every tile stand in SBUF


def fetch(x, start, rows, first, last):
    tile = nl.ndarray((rows, last - first), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x[start : start + rows, first:last])
    return tile


def column(x, start, rows):
    """Rows of x (R, 1) in float32, (rows, 1)."""
    out = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    if x.dtype == nl.float32:
        nisa.dma_copy(dst=out, src=x[start : start + rows])
    else:
        nisa.tensor_copy(dst=out, src=fetch(x, start, rows, 0, 1))
    return out


def spread_over(value, width):
    """A column (rows, 1) `width` times side by side."""
    out = nl.ndarray((value.shape[0], width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=out, value=0.0)
    nisa.tensor_scalar(dst=out, data=out, op0=nl.add, operand0=value)
    return out


def triple(dst, stats, count):
    """Count, mean and squares about the mean, into dst (rows, 3), from any number of such triples."""
    both = nl.ndarray((dst.shape[0], 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.bn_aggr(dst=both, data=stats)
    nisa.memset(dst=dst[:, 0:1], value=float(count))
    nisa.tensor_copy(dst=dst[:, 1:2], src=both[:, 0:1])
    nisa.tensor_scalar(dst=dst[:, 2:3], data=both[:, 1:2], op0=nl.multiply, operand0=float(count))


def statistics(x, start, rows):
    """The triple of each row, (rows, 3)."""
    P = x.shape[1]
    tiles = (P + TILE - 1) // TILE
    found = nl.ndarray((rows, 3 * tiles), dtype=nl.float32, buffer=nl.sbuf)
    for i in range(tiles):
        first, last = i * TILE, min((i + 1) * TILE, P)
        tile = fetch(x, start, rows, first, last)
        pieces = (last - first + STATS - 1) // STATS
        stats = nl.ndarray((rows, 6 * pieces), dtype=nl.float32, buffer=nl.sbuf)
        for j in range(pieces):
            part = tile[:, j * STATS : min((j + 1) * STATS, last - first)]
            nisa.bn_stats(dst=stats[:, 6 * j : 6 * j + 6], data=part)
        triple(found[:, 3 * i : 3 * i + 3], stats, last - first)
    if tiles == 1:
        return found
    out = nl.ndarray((rows, 3), dtype=nl.float32, buffer=nl.sbuf)
    triple(out, found, P)
    return out


def group_statistics(triples, in_group, eps, mean, rstd, mean_of, rstd_of):
    """From the triples of all rows (R, 3): mean and rstd (groups, 1), and once per row in mean_of, rstd_of (groups, in_group)."""
    groups = triples.shape[0] // in_group
    joined = triples.reshape((groups, 3 * in_group))
    for start in range(0, groups, ROWS):
        rows = min(ROWS, groups - start)
        both = nl.ndarray((rows, 2), dtype=nl.float32, buffer=nl.sbuf)
        nisa.bn_aggr(dst=both, data=fetch(joined, start, rows, 0, 3 * in_group))
        shifted = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=shifted, data=both[:, 1:2], op0=nl.add, operand0=eps)
        root = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        # GpSimd's rsqrt is exact everywhere; ScalarE's table ends at 2^-87 and 2^97.
        nisa.tensor_scalar(dst=root, data=shifted, op0=nl.rsqrt, operand0=None, engine=nisa.engine.gpsimd)
        for value, single, each in ((both[:, 0:1], mean, mean_of), (root, rstd, rstd_of)):
            nisa.dma_copy(dst=single[start : start + rows], src=value)
            nisa.dma_copy(dst=each[start : start + rows], src=spread_over(value, in_group))


def normalised(tile, centre, scale):
    """(tile - centre) * scale, in float32."""
    n = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=n, data=tile, op0=nl.subtract, operand0=centre, op1=nl.multiply, operand1=scale)
    return n


@nki.jit
def group_norm_silu_kernel(x, weight, bias, in_group, eps):
    """x (R, P), weight, bias (R, 1), in_group rows a group -> y (R, P), mean and rstd (R / in_group, 1)."""
    R, P = x.shape
    groups = R // in_group
    y = nl.ndarray((R, P), dtype=x.dtype, buffer=nl.shared_hbm)
    mean = nl.ndarray((groups, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    rstd = nl.ndarray((groups, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    triples = nl.ndarray((R, 3), dtype=nl.float32, buffer=nl.private_hbm)
    mean_of = nl.ndarray((groups, in_group), dtype=nl.float32, buffer=nl.private_hbm)
    rstd_of = nl.ndarray((groups, in_group), dtype=nl.float32, buffer=nl.private_hbm)
    for start in range(0, R, ROWS):
        rows = min(ROWS, R - start)
        nisa.dma_copy(dst=triples[start : start + rows], src=statistics(x, start, rows))
    group_statistics(triples, in_group, eps, mean, rstd, mean_of, rstd_of)
    for start in range(0, R, ROWS):
        rows = min(ROWS, R - start)
        w, b = column(weight, start, rows), column(bias, start, rows)
        centre, scale = column(mean_of.reshape((R, 1)), start, rows), column(rstd_of.reshape((R, 1)), start, rows)
        for first in range(0, P, TILE):
            last = min(first + TILE, P)
            n = normalised(fetch(x, start, rows, first, last), centre, scale)
            out = nl.ndarray((rows, last - first), dtype=y.dtype, buffer=nl.sbuf)
            nisa.activation(dst=out, op=nl.silu, data=n, bias=b, scale=w)
            nisa.dma_copy(dst=y[start : start + rows, first:last], src=out)
    return y, mean, rstd


def per_row(t: Tensor, images: int) -> Tensor:
    """(C,) -> (images * C, 1)."""
    return t.expand(images, len(t)).reshape(-1, 1)


def forward(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    N, C = x.shape[:2]
    rows = x.reshape(N * C, x.shape[2:].numel())
    y, mean, rstd = run(group_norm_silu_kernel, rows, per_row(weight, N), per_row(bias, N), C // groups, eps)
    return y.reshape(x.shape).contiguous(memory_format=format_of(x)), mean.reshape(N, groups), rstd.reshape(N, groups)


def too_many_pixels(x: Tensor) -> str | None:
    P = x.shape[2:].numel()
    return f"{P} pixels: three numbers of every {TILE} stand in SBUF, up to {MOST_PIXELS} pixels" if P > MOST_PIXELS else None


def supports(target: str, x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> str | None:
    return too_many_pixels(x)
