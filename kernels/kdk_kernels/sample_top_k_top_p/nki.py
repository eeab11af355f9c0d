"""sample_top_k_top_p in NKI: each row spread over all 128 partitions, thresholds built bit by bit, no sort.

A few rows at a time stay in SBUF, partition q holding the columns from q * C on. Numbers of a row stand in every partition, so that
each compares by itself; what the partitions found is added up by TensorE with a matrix of ones, which puts the sum in all of them. The
draw finds the partition in which the running sum passes its target, brings that partition's columns of every row together, a
row per partition, by TensorE with a matrix of zeros and ones, and scans them.
"""

from typing import Optional

import nki
import nki.isa as nisa
import nki.language as nl
import torch
from torch import Tensor

from kdk.backends.nki.launch import run
from kdk_kernels.sample_top_k_top_p.reference import COLDEST

PARTITIONS = 128
COLUMNS = 4096  # of all rows that a partition holds at a time
WIDEST = PARTITIONS * COLUMNS
BANK = 512  # float32 columns of a PSUM bank
BITS = {"float32": 32, "bfloat16": 16, "float16": 19}  # upper bits of a float32 that tell such logits apart
NOTHING = -1e4  # exp of it is 0
BELOW_ONE = 1 - 2.0**-23  # times a sum: less than the sum


def new(shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def binary(op, a, b, dtype=nl.float32, engine=nisa.engine.unknown):
    out = new(a.shape, dtype)
    nisa.tensor_tensor(dst=out, data1=a, data2=b, op=op, engine=engine)
    return out


def number(op, a, x, dtype=nl.float32):
    """a op x, for a Python number or a (P, 1) tile x."""
    out = new(a.shape, dtype)
    nisa.tensor_scalar(dst=out, data=a, op0=op, operand0=x)
    return out


def product(stationary, moving):
    """stationary (K, M) transposed, times moving (K, N up to 512): (M, N)."""
    sums = nl.ndarray((stationary.shape[1], moving.shape[1]), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=stationary, moving=moving)
    out = new(sums.shape)
    nisa.tensor_copy(dst=out, src=sums)
    return out


def matrices():
    """(128, 128): ones; where the row comes before the column; where it comes before or is the same. (128, 1): ones, 0 to 127."""
    ones = new((PARTITIONS, PARTITIONS))
    nisa.memset(dst=ones, value=1.0)
    before, until = new(ones.shape), new(ones.shape)
    for dst, op in ((before, nl.greater), (until, nl.greater_equal)):
        nisa.affine_select(dst=dst, pattern=[[1, PARTITIONS]], channel_multiplier=-1, on_true_tile=ones, on_false_value=0.0, cmp_op=op)
    place = new((PARTITIONS, 1))
    nisa.iota(dst=place, pattern=[[1, 1]], channel_multiplier=1)
    return ones, before, until, place


def load_rows(logits, start, rows, C):
    """Rows from `start` on, (128, rows, C); -inf beyond their ends."""
    V = logits.shape[1]
    tile = new((PARTITIONS, rows, C), logits.dtype)
    full, rest = V // C, V % C
    if full < PARTITIONS:
        nisa.memset(dst=tile, value=float("-inf"))
    nisa.dma_copy(dst=tile[0:full], src=logits.ap([[C, full], [V, rows], [1, C]], offset=start * V))
    if rest:
        nisa.dma_copy(dst=tile[full : full + 1, :, 0:rest], src=logits.ap([[C, 1], [V, rows], [1, rest]], offset=start * V + full * C))
    return tile


def load_numbers(numbers, start, rows):
    """Rows of numbers (5, N) from `start` on, the same in every partition: (128, 5, rows)."""
    tile = new((PARTITIONS, 5, rows))
    nisa.dma_copy(dst=tile, src=numbers.ap([[0, PARTITIONS], [numbers.shape[1], 5], [1, rows]], offset=start))
    return tile


def largest_of_rows(tile, scratch, start):
    """The largest logit of every row in every partition, (128, rows)."""
    rows = tile.shape[1]
    mine = new((PARTITIONS, rows))
    nisa.tensor_reduce(dst=mine, op=nl.maximum, data=tile, axis=2)
    turned = nl.ndarray((rows, PARTITIONS), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=mine)
    most = new((rows, 1))
    nisa.tensor_reduce(dst=most, op=nl.maximum, data=turned, axis=1)
    # Through memory: a sum by TensorE would turn infinities into NaN, in other rows too.
    nisa.dma_copy(dst=scratch[start : start + rows], src=most)
    nisa.dma_copy(dst=mine, src=scratch.ap([[0, PARTITIONS], [1, rows]], offset=start))
    return mine


def add_up(parts, ones):
    return product(ones, parts)


def sums_of_rows(weights):
    """(128, rows, C) -> (128, rows)."""
    out = new(weights.shape[0:2])
    nisa.tensor_reduce(dst=out, op=nl.add, data=weights, axis=2)
    return out


def float_of(key, out):
    """out: the float32 whose place in the order of all floats is key, (128, rows) uint32."""
    bits = out.view(nl.uint32)
    nisa.tensor_scalar(dst=bits, data=key, op0=nl.bitwise_xor, operand0=0xFFFFFFFF)
    positive, sign = new(key.shape, nl.uint32), new(key.shape, nl.uint32)
    nisa.tensor_scalar(dst=positive, data=key, op0=nl.bitwise_xor, operand0=0x80000000)
    nisa.tensor_scalar(dst=sign, data=key, op0=nl.right_shift, operand0=31)
    nisa.tensor_copy_predicated(dst=bits, src=positive, predicate=sign)


def largest(tile, weights, wanted, ones, bits, all_of=None):
    """The largest floats (128, rows) such that logits of at least as much weigh what is wanted, or more; weights None: their number.

    Of a row in which no number is enough, or with `all_of` set, the least finite one.
    """
    rows, C = tile.shape[1:3]
    key, candidate = new((PARTITIONS, rows), nl.uint32), new((PARTITIONS, rows), nl.uint32)
    bit, good = new((PARTITIONS, rows), nl.uint32), new((PARTITIONS, rows), nl.uint32)
    least, parts = new((PARTITIONS, rows)), new((PARTITIONS, rows))
    nisa.memset(dst=key, value=0)
    nisa.memset(dst=bit, value=0x80000000)

    def step(i):
        nisa.tensor_tensor(dst=candidate, data1=key, data2=bit, op=nl.bitwise_or)
        float_of(candidate, least)
        for r in range(rows):
            chosen = new((PARTITIONS, C))
            if weights == None:  # noqa: E711 (the parser front end knows no `is`)
                nisa.tensor_scalar_reduce(
                    dst=chosen, data=tile[:, r, :], op0=nl.greater_equal, operand0=least[:, r : r + 1],
                    reduce_op=nl.add, reduce_res=parts[:, r : r + 1],
                )  # fmt: skip
            else:
                nisa.scalar_tensor_tensor(
                    dst=chosen, data=tile[:, r, :], op0=nl.greater_equal, operand0=least[:, r : r + 1],
                    op1=nl.multiply, operand1=weights[:, r, :],
                )  # fmt: skip
                nisa.activation(
                    dst=chosen, op=nl.copy, data=chosen,
                    reduce_op=nl.add, reduce_res=parts[:, r : r + 1], reduce_cmd=nisa.reduce_cmd.reset_reduce,
                )  # fmt: skip
        nisa.tensor_tensor(dst=good, data1=add_up(parts, ones), data2=wanted, op=nl.greater_equal)
        nisa.tensor_copy_predicated(dst=key, src=candidate, predicate=good)
        nisa.tensor_scalar(dst=bit, data=bit, op0=nl.right_shift, operand0=1)

    nl.fori_loop(0, bits, step)
    lowest = new(key.shape, nl.uint32)
    nisa.memset(dst=lowest, value=0x00800000)
    if all_of != None:  # noqa: E711 (the parser front end knows no `is`)
        nisa.tensor_copy_predicated(dst=key, src=lowest, predicate=all_of)
    # GpSimd: VectorE computes integers in float32.
    nisa.tensor_tensor(dst=key, data1=key, data2=lowest, op=nl.maximum, engine=nisa.engine.gpsimd)
    float_of(key, least)
    return least


def cut(weights, tile, least):
    """Weights times (tile >= least), in place."""
    for r in range(tile.shape[1]):
        nisa.scalar_tensor_tensor(
            dst=weights[:, r, :], data=tile[:, r, :], op0=nl.greater_equal, operand0=least[:, r : r + 1],
            op1=nl.multiply, operand1=weights[:, r, :],
        )  # fmt: skip


def bring_together(hit, values):
    """From the one partition that `hit` (128, rows) marks of every row: its columns of values (128, rows, C), as (rows, C)."""
    rows, C = values.shape[1:3]
    out = new((rows, C))
    for first in range(0, C, BANK):
        last = min(first + BANK, C)
        sums = nl.ndarray((rows, last - first), dtype=nl.float32, buffer=nl.psum)
        for r in range(rows):
            alone = nl.zeros((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=alone[:, r : r + 1], src=hit[:, r : r + 1])
            nisa.nc_matmul(dst=sums, stationary=alone, moving=values[:, r, first:last])
        nisa.tensor_copy(dst=out[:, first:last], src=sums)
    return out


def draw(weights, scaled, uniform, consts):
    """The place (rows, 1), its logit relative to the largest, and the sum of all weights, (128, rows, C)."""
    ones, before, until, place = consts
    rows, C = weights.shape[1:3]
    parts = sums_of_rows(weights)
    target = binary(nl.multiply, number(nl.minimum, uniform, BELOW_ONE), add_up(parts, ones))
    running, passed = product(before, parts), product(until, parts)
    hit = binary(nl.multiply, binary(nl.less_equal, running, target), binary(nl.greater, passed, target))
    left = product(binary(nl.multiply, binary(nl.subtract, target, running), hit), ones[:, 0:1])
    group = product(hit, place)
    total = product(parts, ones[:, 0:1])

    kept, everywhere = new(weights.shape, nl.uint32), new(weights.shape)
    nisa.tensor_scalar(dst=kept, data=weights, op0=nl.greater, operand0=0.0)
    nisa.memset(dst=everywhere, value=NOTHING)
    nisa.tensor_copy_predicated(dst=everywhere, src=scaled, predicate=kept)
    mine = bring_together(hit, everywhere)
    weight, sums, chosen = new((rows, C)), new((rows, C)), new((rows, C))
    nisa.activation(dst=weight, op=nl.exp, data=mine)
    nisa.memset(dst=chosen, value=1.0)
    nisa.tensor_tensor_scan(dst=sums, data0=chosen, data1=weight, initial=0.0, op0=nl.multiply, op1=nl.add)
    left = binary(nl.minimum, left, number(nl.multiply, sums[:, C - 1 : C], BELOW_ONE))
    column = new((rows, 1))
    nisa.tensor_scalar_reduce(dst=chosen, data=sums, op0=nl.less_equal, operand0=left, reduce_op=nl.add, reduce_res=column)
    numbers = new((rows, C))
    nisa.iota(dst=numbers, pattern=[[1, C]], channel_multiplier=0)
    nisa.scalar_tensor_tensor(dst=chosen, data=numbers, op0=nl.equal, operand0=column, op1=nl.multiply, operand1=mine)
    found = new((rows, 1))
    nisa.tensor_reduce(dst=found, op=nl.add, data=chosen, axis=1)
    return binary(nl.add, number(nl.multiply, group, float(C)), column), found, total


@nki.jit
def sample_kernel(logits, numbers, bits, has_k, has_p, has_min_p):
    """logits (N, V); numbers (5, N): uniform, k, p, min_p, temperature -> token (N, 1), logprob (N, 1)."""
    N, V = logits.shape
    token = nl.ndarray((N, 1), dtype=nl.int32, buffer=nl.shared_hbm)
    logprob = nl.ndarray((N, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    scratch = nl.ndarray((N, 1), dtype=nl.float32, buffer=nl.private_hbm)
    consts = matrices()
    ones = consts[0]
    C = (V + PARTITIONS - 1) // PARTITIONS
    step = max(1, min(PARTITIONS, COLUMNS // C))
    for start in range(0, N, step):
        rows = min(step, N - start)
        tile = load_rows(logits, start, rows, C)
        given = load_numbers(numbers, start, rows)
        uniform, k, p, min_p, temperature = given[:, 0, :], given[:, 1, :], given[:, 2, :], given[:, 3, :], given[:, 4, :]
        most = largest_of_rows(tile, scratch, start)
        per_degree = new((PARTITIONS, rows))
        nisa.reciprocal(dst=per_degree, data=number(nl.maximum, temperature, COLDEST))
        scaled, weights = new((PARTITIONS, rows, C)), new((PARTITIONS, rows, C))
        for r in range(rows):
            nisa.tensor_scalar(
                dst=scaled[:, r, :], data=tile[:, r, :],
                op0=nl.subtract, operand0=most[:, r : r + 1], op1=nl.multiply, operand1=per_degree[:, r : r + 1],
            )  # fmt: skip
        nisa.activation(dst=weights, op=nl.exp, data=scaled)
        everything = product(sums_of_rows(weights), ones[:, 0:1])
        if has_min_p:
            kept = new(weights.shape)
            nisa.tensor_copy(dst=kept, src=weights)
        if has_k:
            cut(weights, tile, largest(tile, None, k, ones, bits))
        if has_p:
            wanted = number(nl.maximum, binary(nl.multiply, p, add_up(sums_of_rows(weights), ones)), COLDEST)
            cut(weights, tile, largest(tile, weights, wanted, ones, bits, number(nl.greater_equal, p, 1.0, nl.uint32)))
        if has_min_p:
            cut(weights, kept, min_p)
        warm = number(nl.greater, temperature, 0.0)
        place, found, total = draw(weights, scaled, binary(nl.multiply, uniform, warm), consts)
        finish(place, found, total, everything, token[start : start + rows], logprob[start : start + rows])
    return token, logprob


def finish(place, found, total, everything, token, logprob):
    """token and logprob of rows; -1 and NaN where everything is NaN."""
    log_total = new(total.shape)
    nisa.activation(dst=log_total, op=nl.log, data=total)
    log_probability = binary(nl.subtract, found, log_total)
    is_distribution = number(nl.greater, everything, 0.0)
    chosen = new(place.shape, nl.int32)
    nisa.tensor_scalar(dst=place, data=place, op0=nl.add, operand0=1.0)
    nisa.tensor_scalar(dst=chosen, data=place, op0=nl.multiply, operand0=is_distribution, op1=nl.subtract, operand1=1.0)
    nisa.dma_copy(dst=token, src=chosen)
    nisa.dma_copy(dst=logprob, src=log_probability)


def forward(
    logits: Tensor, uniform: Tensor, k: Optional[Tensor], p: Optional[Tensor], min_p: Optional[Tensor], temperature: Optional[Tensor]
) -> tuple[Tensor, Tensor]:
    N, V = logits.shape
    counts = None if k is None else k.where((k > 0) & (k < V), V)
    given = ((uniform, 0.0), (counts, 0.0), (p, 1.0), (min_p, 0.0), (temperature, 1.0))
    numbers = torch.stack([uniform.new_full((N,), usual, dtype=torch.float32) if t is None else t.float() for t, usual in given])
    bits = BITS[str(logits.dtype).removeprefix("torch.")]
    token, logprob = run(sample_kernel, logits, numbers, bits, k is not None, p is not None, min_p is not None)
    return token.reshape(N), logprob.reshape(N)


def supports(
    target: str,
    logits: Tensor,
    uniform: Tensor,
    k: Optional[Tensor],
    p: Optional[Tensor],
    min_p: Optional[Tensor],
    temperature: Optional[Tensor],
) -> str | None:
    """A row stands in SBUF four times over in float32."""
    V = logits.shape[-1]
    return f"V = {V}: a row fits SBUF up to V = {WIDEST}" if V > WIDEST else None
