"""Products as a TPU's matrix units make them: float32 operands become bfloat16 unless a kernel asks for more."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

ONE_PASS = "BF16_BF16_F32"  # jax's name for it, which XLA takes no notice of on a CPU


@contextlib.contextmanager
def products_in_one_pass() -> Iterator[None]:
    """Inside, a program that is traced rounds the float32 operands of its products to bfloat16, as Mosaic and XLA do for a TPU.

    precision=jax.lax.Precision.HIGHEST of a product is float32, as there. jax keeps what it traced in here apart from the rest.
    """
    import jax

    _teach()
    with jax.default_matmul_precision(ONE_PASS):
        yield


@functools.cache
def _teach() -> None:
    """Make jax do what its name for one pass says. Nothing changes for a program that does not ask for it."""
    import jax
    from jax import lax

    original = lax.dot_general_p.bind
    low = (None, lax.DotAlgorithmPreset[ONE_PASS], (lax.Precision.DEFAULT, lax.Precision.DEFAULT))

    def bind(*operands: Any, **parameters: Any) -> Any:
        if jax.config.jax_default_matmul_precision == ONE_PASS and parameters["precision"] in low:
            operands = tuple([_rounded(o) if o.dtype == "float32" else o for o in operands])
            parameters["precision"] = None
        return original(*operands, **parameters)

    lax.dot_general_p.bind = bind


def _rounded(operand: Any) -> Any:
    """To a bfloat16 and back. Of two conversions a compiler may make none."""
    from jax import lax

    return lax.reduce_precision(operand, exponent_bits=8, mantissa_bits=7)
