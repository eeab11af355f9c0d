"""Rotary position embedding in NKI: 128 tokens at a time, one per partition, with all of their heads.

The tables of a tile are fetched once and seen by every head through a view. VectorE computes the first members of the
pairs and GpSimd the second: VectorE alone would be busy for much longer than the data takes to arrive.
"""

from typing import Optional

import nki
import nki.isa as nisa
import nki.language as nl
from torch import Tensor

from kdk.backends.nki.launch import run

PARTITIONS = 128
TILE_ELEMENTS = 4096  # of one token, in whole heads: two iterations of float32 fit into SBUF
TUNABLE = {"elements": (512, 1024, 2048, 4096, 8192)}  # of one token, in whole heads
MAX_HEAD = 8192  # elements of one head that fit with everything that goes with them


def load(line, rows, start, height, head, heads, width):
    """Fetch `height` tokens from `start` on, (height, heads, width), of a tensor that `lines` has prepared."""
    tokens, sequence_stride, token_stride, head_stride = rows
    tile = nl.ndarray((height, heads, width), dtype=line.dtype, buffer=nl.sbuf)
    done = 0
    while done < height:  # one DMA per sequence that the tile touches
        sequence, token = (start + done) // tokens, (start + done) % tokens
        part = min(height - done, tokens - token)
        offset = sequence * sequence_stride + token * token_stride + head * head_stride
        source = line.ap([[token_stride, part], [head_stride, heads], [1, width]], offset=offset)
        nisa.dma_copy(dst=tile[done : done + part], src=source)
        done += part
    return tile


def halves(tile, rotary, interleaved):
    """Views of the first and the second members of the pairs, (P, heads, R) -> 2 x (P, heads, R/2)."""
    if interleaved:
        return tile[:, :, 0:rotary:2], tile[:, :, 1:rotary:2]
    return tile[:, :, 0 : rotary // 2], tile[:, :, rotary // 2 : rotary]


def times(data, table, engine):
    product = nl.ndarray(data.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product, data1=data, data2=table, op=nl.multiply, engine=engine)
    return product


def rotate_tile(x, cos, sin, interleaved, transposed):
    """x (P, heads, D) by tables (P, 1, R), in place; the elements past R stay as they are."""
    heads, rotary = x.shape[1], cos.shape[2]
    first, second = halves(x, rotary, interleaved)
    cos_first, cos_second = halves(cos.broadcast(1, heads), rotary, interleaved)
    sin_first, sin_second = halves(sin.broadcast(1, heads), rotary, interleaved)
    minus, plus = nl.subtract, nl.add
    if transposed:  # the sines of a pair change places, and their signs
        sin_first, sin_second = sin_second, sin_first
        minus, plus = nl.add, nl.subtract
    vector, gpsimd = nisa.engine.vector, nisa.engine.gpsimd
    first_cos, second_sin = times(first, cos_first, vector), times(second, sin_first, vector)
    second_cos, first_sin = times(second, cos_second, gpsimd), times(first, sin_second, gpsimd)
    nisa.tensor_tensor(dst=first, data1=first_cos, data2=second_sin, op=minus, engine=vector)
    nisa.tensor_tensor(dst=second, data1=second_cos, data2=first_sin, op=plus, engine=gpsimd)


def rotate_tokens(out, x, rows, start, height, cos, sin, interleaved, transposed, elements):
    """All heads of `height` tokens from `start` on, as many at a time as fit."""
    heads, dim = out.shape[1], out.shape[2]
    step = max(1, elements // dim)
    for head in range(0, heads, step):
        part = min(step, heads - head)
        tile = load(x, rows, start, height, head, part, dim)
        rotate_tile(tile, cos, sin, interleaved, transposed)
        nisa.dma_copy(dst=out[start : start + height, head : head + part], src=tile)


@nki.jit
def rope_kernel(
    x, shape, rows, cos, cos_rows, sin, sin_rows, rotary, interleaved, transposed, elements, pair, y=None, y_shape=None, y_rows=None
):
    """x and, with `pair`, y, as `lines` prepares them, (tokens, heads, D) in their shapes, rotated: contiguous."""
    x_out = nl.ndarray(shape, dtype=x.dtype, buffer=nl.shared_hbm)
    if pair:
        y_out = nl.ndarray(y_shape, dtype=y.dtype, buffer=nl.shared_hbm)
    tokens = shape[0]
    for start in range(0, tokens, PARTITIONS):
        height = min(PARTITIONS, tokens - start)
        c = load(cos, cos_rows, start, height, 0, 1, rotary)
        s = load(sin, sin_rows, start, height, 0, 1, rotary)
        rotate_tokens(x_out, x, rows, start, height, c, s, interleaved, transposed, elements)
        if pair:
            rotate_tokens(y_out, y, y_rows, start, height, c, s, interleaved, transposed, elements)
    if pair:
        return x_out, y_out
    return x_out


def lines(x: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """A tensor (B, S, heads, width) as a contiguous line of memory, and how its tokens lie in it.

    The toolchain takes contiguous tensors. A view whose elements of a head lie side by side, such as the queries of a
    fused projection, is passed as the memory that it spans, and the kernel steps over what lies between. Others are
    copied: DMA of single elements would cost more.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, tokens = x.shape[:2]
    sequence_stride, token_stride, head_stride, _ = x.stride()
    if tokens == 1:
        tokens, token_stride = batch, sequence_stride
    elif sequence_stride == tokens * token_stride:
        tokens = batch * tokens
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.as_strided((span,), (1,)), (tokens, sequence_stride, token_stride, head_stride)


def rotate(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool, elements: Optional[int]
) -> list[Tensor]:
    """The rotation of one or two tensors (..., S, heads, D) by tables (..., S, R)."""
    batched = [x if x.dim() == 4 else x.unsqueeze(0) for x in tensors]
    batch = batched[0].shape[0]
    # A table shared by the sequences is read again for each of them: its batch stride is 0.
    tables = [(t if t.dim() == 3 else t.unsqueeze(0)).expand(batch, -1, -1).unsqueeze(-2) for t in (cos, sin)]
    first, *second = [_as_arguments(x) for x in batched]
    how = cos.shape[-1], interleaved, transposed, elements or TILE_ELEMENTS, bool(second)
    outputs = run(rope_kernel, *first, *lines(tables[0]), *lines(tables[1]), *how, *(second[0] if second else ()))
    return [out.reshape(x.shape) for out, x in zip(outputs, tensors)]


def _as_arguments(x: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, int, int, int]]:
    line, rows = lines(x)
    return line, (x.shape[0] * x.shape[1], *x.shape[2:]), rows


def forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, elements: Optional[int] = None
) -> tuple[Tensor, Tensor]:
    q_out, k_out = rotate([q, k], cos, sin, interleaved, transposed=False, elements=elements)
    return q_out, k_out


def supports(
    target: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, elements: Optional[int] = None
) -> str | None:
    return head_too_long(q, elements)


def head_too_long(x: Tensor, elements: Optional[int]) -> str | None:
    """A tile holds at least one whole head."""
    if elements is not None and elements > TILE_ELEMENTS and x.itemsize == 4:
        return f"elements = {elements}: two iterations of float32 fit SBUF up to {TILE_ELEMENTS}"
    return f"D = {x.shape[-1]}: one head fits SBUF up to D = {MAX_HEAD}" if x.shape[-1] > MAX_HEAD else None
