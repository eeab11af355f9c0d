"""rms_norm_dynamic_quant in plain torch: the semantics every kernel is checked against."""

from typing import Any

import torch
from torch import Tensor

from kdk.errors import InputError
from kdk_kernels.rms_norm.reference import check as check_rms_norm
from kdk_kernels.rms_norm.reference import rms_norm

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
SMALLEST = 2.0**-100  # of the largest value of a row: keeps its inverse finite in float32


def rms_norm_dynamic_quant(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, dtype: torch.dtype = torch.int8
) -> tuple[Tensor, Tensor]:
    """Root-mean-square normalisation over the last dimension, quantised to 8 bits with a scale per row.

    y = x / sqrt(mean(x^2) + eps) * (offset + weight), as in rms_norm, stays in float32; then per row

        scale = max(max|y|, 2^-100) / largest        q = y / scale, rounded to dtype

    with largest = 127 for int8 (symmetric: -128 is not used), 448 for float8_e4m3fn, 57344 for float8_e5m2; to nearest, ties to
    even. So q * scale is y within half a quantum. With an eps above 0 a row of zeros gives q = 0; a row whose mean square is
    beyond float32, of values above 1e19, gives 0 as well, as in rms_norm.

    Semantics: dynamic per-token quantisation as serving engines fuse it into the norm (vLLM's rms_norm_dynamic_per_token_quant),
    without their rounding of y to the dtype of x in between.

    Args:
        x: (..., H), float32, bfloat16, float16 or float64, any strides.
        weight: (H,), the dtype of x, or float32.
        eps: added to the mean square; not negative.
        offset: added to the weight.
        dtype: torch.int8, torch.float8_e4m3fn or torch.float8_e5m2. float8_e4m3fn does not exist on GPUs before sm_89 and on
            Trainium2, whose kernels refuse it.

    Returns:
        q: like x, of dtype `dtype`, contiguous.
        scale: (...), float32 (float64 for float64). A row that is not finite has a scale that is not, and q is undefined there.

    Raises:
        kdk.errors.InputError: sizes, dtypes or eps that do not fit.

    No gradients: q is a rounded value.
    """
    return quantise(values({"x": x, "weight": weight, "eps": eps, "offset": offset}), dtype)


def largest_of(dtype: Any) -> float:
    """The largest number of a format: torch's dtype, another library's, or a name."""
    return LARGEST[str(dtype).removeprefix("torch.")]


def quantise(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(q, scale) of the rows of y, float32 or float64."""
    largest = largest_of(dtype)
    scale = y.abs().amax(-1).clamp_min(SMALLEST) / largest
    q = (y / scale.unsqueeze(-1)).clamp(-largest, largest)
    return (q.round().nan_to_num(0.0) if dtype == torch.int8 else q).to(dtype), scale


def values(arguments: dict[str, Any]) -> Tensor:
    """The rows before they are quantised."""
    x, weight = arguments["x"], arguments["weight"]
    wide = torch.promote_types(x.dtype, torch.float32)
    return rms_norm(x.to(wide), weight.to(wide), arguments["eps"], arguments["offset"])[0]


def check(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, dtype: torch.dtype = torch.int8) -> None:
    """Raise InputError unless the arguments are what `rms_norm_dynamic_quant` takes."""
    check_rms_norm(x, weight, eps, offset, op="rms_norm_dynamic_quant")
    if x.shape[-1] == 0:
        raise InputError("QUANT-X", "rms_norm_dynamic_quant: the shape of x", value=tuple(x.shape), limit="rows of one element or more")
    check_dtype(dtype, "rms_norm_dynamic_quant")


def check_dtype(dtype: torch.dtype, op: str) -> None:
    """Raise InputError for a dtype that rows are not quantised to."""
    if str(dtype).removeprefix("torch.") not in LARGEST:
        limit = ", ".join(f"torch.{name}" for name in LARGEST)
        raise InputError("QUANT-DTYPE", f"{op}: dtype", value=dtype, limit=limit, way_out="torch.int8 is everywhere")
