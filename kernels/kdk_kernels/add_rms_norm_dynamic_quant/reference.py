"""add_rms_norm_dynamic_quant in plain torch: the semantics every kernel is checked against."""

from typing import Any

import torch
from torch import Tensor

from kdk.errors import InputError
from kdk.rounding import as_stored
from kdk_kernels.add_rms_norm.reference import check as check_add_rms_norm
from kdk_kernels.rms_norm.reference import rms_norm
from kdk_kernels.rms_norm_dynamic_quant.reference import check_dtype, quantise


def add_rms_norm_dynamic_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, dtype: torch.dtype = torch.int8
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a block's result to the residual stream, normalise the sum, and quantise it to 8 bits with a scale per row.

    new_residual = x + residual, rounded once to the dtype of x; (q, scale) = rms_norm_dynamic_quant(new_residual, ...): see
    there for the formats and the rounding. Semantics: add_rms_norm, and vLLM's rms_norm_dynamic_per_token_quant with a residual,
    without its rounding of the normalised value in between.

    Args:
        x: (..., H), float32, bfloat16, float16 or float64, any strides.
        residual: shape, dtype and device of x, any strides.
        weight: (H,), the dtype of x, or float32.
        eps: added to the mean square; not negative.
        offset: added to the weight.
        dtype: torch.int8, torch.float8_e4m3fn or torch.float8_e5m2.

    Returns:
        q: like x, of dtype `dtype`, contiguous.
        scale: (...), float32 (float64 for float64). A row that is not finite has a scale that is not, and q is undefined there.
        new_residual: like x, contiguous.

    Raises:
        kdk.errors.InputError: sizes, dtypes, devices or eps that do not fit.

    No gradients: q is a rounded value.
    """
    given = {"x": x, "residual": residual, "weight": weight, "eps": eps, "offset": offset}
    wide = torch.promote_types(x.dtype, torch.float32)
    return (*quantise(values(given), dtype), (x.to(wide) + residual.to(wide)).to(x.dtype))


def values(arguments: dict[str, Any]) -> Tensor:
    """The rows before they are quantised."""
    x, weight = arguments["x"], arguments["weight"]
    wide = torch.promote_types(x.dtype, torch.float32)
    total = as_stored(x.to(wide) + arguments["residual"].to(wide), x.dtype)
    return rms_norm(total.to(wide), weight.to(wide), arguments["eps"], arguments["offset"])[0]


def check(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, dtype: torch.dtype = torch.int8) -> None:
    """Raise InputError unless the arguments are what `add_rms_norm_dynamic_quant` takes."""
    check_add_rms_norm(x, residual, weight, eps, offset, op="add_rms_norm_dynamic_quant")
    if x.shape[-1] == 0:
        raise InputError("QUANT-X", "add_rms_norm_dynamic_quant: the shape of x", value=tuple(x.shape), limit="rows of one element or more")
    check_dtype(dtype, "add_rms_norm_dynamic_quant")
