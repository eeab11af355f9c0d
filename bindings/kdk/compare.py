"""How outputs are compared that are no rounded numbers: a discrete choice, quantised values. Declared in `Op`; imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """A discrete choice among outputs and saved tensors: the indices of a top-k, a sampled token.

    Where two scores are a rounding apart, a kernel may choose either; its other results must then be those of its own choice.
    So a choice is judged by `valid`, and the rest by the usual rule against the reference that was made to choose the same.

    outputs: names of the chosen outputs or saved tensors, integers.
    valid(arguments, chosen, tolerance) -> bool tensor: per row, whether the choice is right. arguments: all of the operator's, by
        name, tensors in float64. chosen: the kernel's tensors by name; their values may be anything. tolerance: by how much,
        relative to a score's size, a score computed in float32 may be off: a few roundings, more for a longer sum (`Op.longest` of
        the chosen outputs). Scores whose inputs are exactly equal are a tie, decided as the operator's documentation says.
    given(arguments, chosen) -> tuple: the other outputs and saved tensors that belong to that choice, in the order of
        `Op.outputs` and `Op.saved`, computed like the reference in promote_types(dtype, float32).
    """

    outputs: tuple[str, ...]
    valid: Callable[[dict[str, Any], dict[str, Tensor], float], Tensor]
    given: Callable[[dict[str, Any], dict[str, Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Quantised:
    """A quantised output: int8 or an 8-bit float, times a scale.

    The kernel's q times its own scale lies within half a quantum of the value before quantisation, plus what the rule for
    floating-point outputs allows that value: only an element within rounding of a tie may be one quantum off. The quantum is the
    distance between neighbours of q: 1 for integers, the spacing at q for 8-bit floats. Values beyond the format saturate. Where
    value or scale is not finite nothing is asked of q; where the scale is 0, it is the reference's q.

    scale: the output that holds the scales, judged by the rule for floating-point outputs; its dtype is
        promote_types(dtype, float32). Its dimensions are the leading ones of q; one that is smaller is shared by as many
        neighbours as divide it.
    of(arguments) -> Tensor: the values before quantisation, in the shape of q, from all arguments by name; computed like the
        reference in promote_types(dtype, float32).
    """

    scale: str
    of: Callable[[dict[str, Any]], Tensor]
