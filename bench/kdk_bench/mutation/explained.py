"""Mutants that no check can kill because they equal the original, each with the reason.

An entry that matches no mutant, or one that a check kills, fails the run: the list never outlives what it explains.
"""

EXPLAINED: dict[str, str] = {
    "add_rms_norm.backward nki | rms_norm_backward_kernel: if copies > 0: -> if copies >= 0:": (
        "without a copy of dx to write, the scale is loaded and not read"
    ),
    "rope.forward nki | lines: elif sequence_stride == tokens * token_stride: -> elif sequence_stride == tokens / token_stride:": (
        "whether the sequences are walked as one only saves instructions; where the changed condition holds, there is one sequence, "
        "or tokens overlap in memory"
    ),
    (
        "silu_and_mul.forward triton | silu_and_mul_kernel: y = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32) -> "
        "y = gate / (1.0 + tl.exp(-gate)) * up"
    ): "the other factor is float32, and Triton makes float32 of the product's operands",
    (
        "add_rms_norm.forward nki | inverse_rms: squares = nl.ndarray(part.shape, dtype=nl.float32, buffer=nl.sbuf) -> "
        "squares = nl.ndarray(part.shape, dtype=nl.bfloat16, buffer=nl.sbuf)"
    ): "the squares are summed in float32 on their way to this tile, which nothing reads",
    (
        "rms_norm.forward nki | inverse_rms: squares = nl.ndarray(part.shape, dtype=nl.float32, buffer=nl.sbuf) -> squares ="
        " nl.ndarray(part.shape, dtype=nl.bfloat16, buffer=nl.sbuf)"
    ): "the squares are summed in float32 on their way to this tile, which nothing reads",
    "router_topk.backward nki | load_wide: if E < EIGHT: -> if E <= EIGHT:": "eight columns are filled, and then written in full",
    (
        "logcumsumexp.backward nki | two_at_a_time: ends = nl.ndarray((width, pairs + 1), dtype=nl.float32, buffer=nl.sbuf) "
        "-> ends = nl.ndarray((width, pairs + 2), dtype=nl.float32, buffer=nl.sbuf)"
    ): "one column more than is read",
    (
        "sample_top_k_top_p.forward nki | forward: numbers = torch.stack([uniform.new_full((N,), usual, dtype=torch.float32)"
        " if t is None else t.float() for t, usual in given]) -> numbers = torch.stack([uniform.new_full((N,), usual, "
        "dtype=torch.bfloat16) if t is None else t.float() for t, usual in given])"
    ): "the usual values are 0 and 1, and stacking them with float32 makes float32 of them",
    (
        "sample_top_k_top_p.forward nki | forward: given = ((uniform, 0.0), (counts, 0.0), (p, 1.0), (min_p, 0.0), "
        "(temperature, 1.0)) -> given = ((uniform, 1.0), (counts, 0.0), (p, 1.0), (min_p, 0.0), (temperature, 1.0))"
    ): "uniform is always given",
    "cumsum.backward nki | fetch: if low > first or high < first + count: -> if low >= first or high < first + count:": (
        "a tile is filled that is then written in full"
    ),
    "logcumsumexp.forward nki | fetch: if low > first or high < first + count: -> if low >= first or high < first + count:": (
        "a tile is filled that is then written in full"
    ),
    "cumsum.forward nki | fetch: if low > first or high < first + count: -> if low > first or high <= first + count:": (
        "a tile is filled that is then written in full"
    ),
    "logcumsumexp.forward nki | fetch: if low > first or high < first + count: -> if low > first or high <= first + count:": (
        "a tile is filled that is then written in full"
    ),
    "group_norm_silu.forward nki | column: if x.dtype == nl.float32: -> if x.dtype != nl.float32:": (
        "engines read any number as float32: the copy is for speed"
    ),
    (
        "linear_cross_entropy.forward nki | load_start: nisa.dma_copy(dst=raw, src=start.ap([[0, ROWS], [1, 1]])) -> "
        "nisa.dma_copy(dst=raw, src=start.ap([[0, ROWS], [1 + 1, 1]]))"
    ): "of one element: its stride moves nothing",
    (
        "gather_rows.forward nki | gather_rows_kernel: nisa.dma_copy(dst=tile, src=table.ap([[H, rows], [1, width]], "
        "offset=first, vector_offset=numbers)) -> nisa.dma_copy(dst=tile, src=table.ap([[H + 1, rows], [1, width]], "
        "offset=first, vector_offset=numbers))"
    ): "the first stride of a pattern is not read where a vector of offsets takes its place",
    (
        "group_norm_silu.backward triton | _tile: return (tl.where(mask, normalised, 0.0), tl.where(mask, dz, 0.0), w, scale) -> "
        "return (tl.where(mask, normalised, 1.0), tl.where(mask, dz, 0.0), w, scale)"
    ): "outside of the tile it is only multiplied by dz, which is 0 there, or not written",
    (
        "group_norm_silu.backward triton | _means: group, lane = (tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)) -> "
        "group, lane = (tl.program_id(0), tl.arange(0, PARTS))"
    ): "2^31 parts of groups stand for more elements of x than any memory holds",
    (
        "group_norm_silu.backward triton | whole: channels, P = (x.shape[1] // groups, x.shape[2]) -> "
        "channels, P = (x.shape[1] // groups, x.shape[1])"
    ): "a choice of tiles, for any of which the kernel is right",
    "group_norm_silu.forward pallas | block_shape: parts = pl.cdiv(P, most) -> parts = pl.cdiv(P, most) - 1": (
        "a choice of tiles, for any of which the kernel is right"
    ),
    (
        "sample_top_k_top_p.forward pallas | kernel: low, _ = jax.lax.fori_loop(0, 32 - shift, halve, (bits(least), bits(most) + 1)) -> "
        "low, _ = jax.lax.fori_loop(0, 33 - shift, halve, (bits(least), bits(most) + 1))"
    ): "an interval of one number is not halved any further",
    (
        "linear_cross_entropy.forward pallas | _on_its_side: parts = [bias[:, c:c + LANES] for c in range(0, bias.shape[1], LANES)] -> "
        "parts = [bias[:, c:c + LANES] for c in range(0, bias.shape[1] - 1, LANES)]"
    ): "a block has whole tiles of columns: as many pieces either way",
    (
        "linear_cross_entropy.forward pallas | product: if x.dtype != jnp.float32 or not CHAIN < H < 4 * LANES: -> "
        "if x.dtype != jnp.float32 or not CHAIN < H < 5 * LANES:"
    ): "how the terms of a product are put together; both ways are float32",
}
