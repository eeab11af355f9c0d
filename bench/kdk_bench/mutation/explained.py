"""Mutants that no check can kill because they equal the original, each with the reason.

An entry that matches no mutant, or one that a check kills, fails the run: the list never outlives what it explains.
"""

EXPLAINED: dict[str, str] = {
    "add_rms_norm.backward nki | rms_norm_backward_kernel: if copies > 0: -> if copies >= 0:": (
        "without a copy of dx to write, the scale is loaded and not read"
    ),
    (
        "rms_norm.forward nki | normalise: squares = nl.ndarray(part.shape, dtype=nl.float32, buffer=nl.sbuf) -> "
        "squares = nl.ndarray(part.shape, dtype=nl.bfloat16, buffer=nl.sbuf)"
    ): "the squares are summed in float32 on their way to this tile, which nothing reads",
    "rope.forward nki | lines: elif sequence_stride == tokens * token_stride: -> elif sequence_stride == tokens / token_stride:": (
        "whether the sequences are walked as one only saves instructions; where the changed condition holds, there is one sequence, "
        "or tokens overlap in memory"
    ),
    (
        "silu_and_mul.forward triton | silu_and_mul_kernel: y = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32) -> "
        "y = gate / (1.0 + tl.exp(-gate)) * up"
    ): "the other factor is float32, and Triton makes float32 of the product's operands",
}
