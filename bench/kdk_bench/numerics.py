"""When is a kernel's output right? The acceptance rule, on tensors only.

Three tensors decide. All of them come from inputs that were already rounded to the working dtype:

* k, the kernel's output, in the working dtype d;
* o, the oracle: the reference computed in float64 (for integer and boolean outputs in their own dtype);
* y, the yardstick (`yardstick`): how well d can do, the better of two ways to compute the reference.

A fixed tolerance is either so wide that it hides a dropped element or so narrow that it refuses another order of
summation. Here the reference's own error sets the scale: k may be at most twice as wrong as y, per slice, with floors
of a few units in the last place for slices in which y was lucky.

**float64.** The oracle is then as imprecise as the kernel, so nothing tighter than the rounding of a reduction can be
asked: y is the reference itself, its error is about 0, and the floors decide, twice those of float32 in units of the
last place because both sides round.

**Limits of the rule.** A slice is judged against its own largest value. A 1-D output has one slice, so an element a
million times smaller than the largest is hardly judged there. In 16 bits a wrong formula can hide below one rounding:
`Pool` looks for it over many elements, and the same kernel in float32 shows it.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Fewer elements than this in a slice: its worst error says more about luck than about the kernel.
SHORTEST_SLICE = 8
# Fewer pooled elements than this say nothing about a share of half a percent.
SMALLEST_POOL = 4096


@dataclass(frozen=True)
class Verdict:
    """Whether an output is accepted, why not, and the worst error as a multiple of its limit (nan: not known)."""

    accepted: bool
    reason: str = ""
    error_ratio: float = 0.0


class Comparison(Protocol):
    """How an output is compared. `judge` has checked shapes and dtypes, brought all to the CPU, and none is empty."""

    def judge(self, k: Tensor, y: Tensor, o: Tensor, longest: int, spread: Tensor | None = None) -> Verdict: ...


class Floors(NamedTuple):
    """Errors that are always allowed in a slice, whatever the yardstick's error was."""

    worst: float  # of the slice's largest value
    rms_of_rms: float  # of the slice's RMS
    rms_of_peak: float  # of the slice's largest value
    absolute: float


def floors(d: torch.dtype, longest: int) -> Floors:
    """The floors for outputs of dtype `d` whose longest reduction has `longest` terms."""
    info = torch.finfo(d)
    if d in (torch.float32, torch.float64):
        # The output carries the rounding of the sum itself, which grows with the square root of its length. Where the terms
        # are squares of 16-bit values it drifts: the low bits of a square are not random (m * m mod 8 is 0, 1 or 4), so a sum
        # in order loses an eighth of its last place more often than it wins it. Measured: 73 eps over 4,099 terms.
        units = (2 + max(math.sqrt(longest) / 2, longest / 50)) * (2 if d == torch.float64 else 1)
        return Floors(units * info.eps, units * info.eps, 0.0, info.tiny)
    # Accumulated in float32 and rounded once: one rounding, however long the sum.
    # Hardware may flush subnormals to zero in the dtypes with float32's exponents, where nothing real lives. In float16
    # and 8 bits they are ordinary values (a probability among 32,000 is one), so only their spacing is allowed.
    wide_exponents = d == torch.bfloat16
    return Floors(info.eps, 0.0, 0.3 * info.eps, info.tiny if wide_exponents else info.tiny * info.eps)


class Errors(NamedTuple):
    """Per element, in the output's shape: |k - o|, infinite where k breaks the rule for values that are not finite, and
    the limit for the worst error of its slice. Per slice: the RMS error and its limit."""

    error: Tensor
    limit: Tensor
    rms: Tensor
    rms_limit: Tensor


def slices(t: Tensor) -> Tensor:
    """`t` as rows to be judged one by one: along the last axis, with as many axes before it as it takes to make a row
    of SHORTEST_SLICE elements; one row for the whole tensor when there are no more."""
    length = 1
    for size in reversed(t.shape[1:]):
        length *= size
        if length >= SHORTEST_SLICE:
            return t.reshape(-1, length)
    return t.reshape(1, -1)


def errors(k: Tensor, y: Tensor, o: Tensor, longest: int, spread: Tensor | None = None) -> Errors:
    """What `Rounded` compares. Floating-point k and y of one dtype, o in float64, one shape, CPU, not empty."""
    floor = floors(k.dtype, longest)
    rounded, kernel, reference = o.to(k.dtype).double(), k.double(), y.double()
    # Where the dtype cannot hold the oracle, it must not set the scale of its slice either.
    largest, past_the_end = _end_of_range(k.dtype)
    in_range = torch.isfinite(o) & (o.abs() <= largest * (1 + floor.worst))
    expected = torch.where(in_range, o, 0.0)
    # One rounding decides between the largest number and infinity: there they are neighbours, and either may be right.
    overflowed = in_range & (o.abs() >= largest * (1 - floor.worst)) & (kernel == o.sign() * math.inf)
    kernel = torch.where(overflowed, o.sign() * past_the_end, kernel)
    measured = in_range & torch.isfinite(kernel)
    may_be_special = ~in_range | ~torch.isfinite(rounded) | ~torch.isfinite(reference)
    shows_one = may_be_special & (_same_value(kernel, rounded) | _same_value(kernel, reference))
    error = torch.where(measured, (kernel - expected).abs(), torch.where(shows_one, 0.0, math.inf))
    # Where only the reference is not finite it does not show what can be reached; rounding the oracle does.
    reference = torch.where(torch.isfinite(reference), reference, rounded)
    reference_error = torch.where(in_range & torch.isfinite(reference), (reference - expected).abs(), 0.0)
    if spread is not None:
        reference_error = torch.maximum(reference_error, torch.nan_to_num(spread, nan=0.0, posinf=0.0))
    expected_rows, error_rows = slices(expected), slices(error)
    reference_rows = slices(reference_error)
    peak = expected_rows.abs().amax(-1)
    limit = torch.maximum(2 * reference_rows.amax(-1), floor.worst * peak) + floor.absolute
    rms_floor = torch.maximum(floor.rms_of_rms * _rms(expected_rows), floor.rms_of_peak * peak)
    rms_limit = torch.maximum(2 * _rms(reference_rows), rms_floor) + floor.absolute
    limits = limit[:, None].expand_as(error_rows).reshape(o.shape)
    return Errors(error, limits, _rms(error_rows), rms_limit)


class Rounded:
    """Floating-point outputs: not finite only where the oracle (rounded) or the reference is so, and showing one of the
    two; elsewhere the worst and the RMS error of every slice at most twice the yardstick's, or the floor."""

    def judge(self, k: Tensor, y: Tensor, o: Tensor, longest: int, spread: Tensor | None = None) -> Verdict:
        e = errors(k, y, o, longest, spread)
        if torch.isinf(e.error).any():
            return Verdict(False, _special_value_reason(k, y, o, e.error), math.nan)
        # The largest float64 values can make an error overflow against a limit that does too.
        element = torch.nan_to_num(e.error / e.limit, nan=math.inf)
        slice_ = torch.nan_to_num(e.rms / e.rms_limit, nan=math.inf)
        worst, rms = float(element.max()), float(slice_.max())
        ratio = max(worst, rms)
        if worst > 1:
            at = unravel(int(element.argmax()), o.shape)
            return Verdict(
                False,
                f"worst error {float(e.error[at]):.3g} at {at} is {worst:.3g} times the limit {float(e.limit[at]):.3g} "
                f"of its slice (got {float(k[at]):.6g}, expected {float(o[at]):.6g})",
                ratio,
            )
        if rms > 1:
            row = int(slice_.argmax())
            return Verdict(
                False,
                f"RMS error {float(e.rms[row]):.3g} of slice {row} of {len(e.rms)} is {rms:.3g} times its limit "
                f"{float(e.rms_limit[row]):.3g}",
                ratio,
            )
        return Verdict(True, "", ratio)


class Exact:
    """Outputs that are moved, selected or counted: the oracle's values, each of them.

    Values, not bits: any NaN equals any NaN and -0.0 equals 0.0, because IEEE 754 leaves the payload open, and max and
    multiplication by a zero mask leave the sign of zero to the order of the operands. `same_bits` compares bits.
    """

    def judge(self, k: Tensor, y: Tensor, o: Tensor, longest: int, spread: Tensor | None = None) -> Verdict:
        wrong = ~_same_value(k, o.to(k.dtype))
        count = int(wrong.sum())
        if count == 0:
            return Verdict(True)
        at = unravel(int(wrong.flatten().int().argmax()), o.shape)
        return Verdict(
            False,
            f"{count} of {k.numel()} elements differ where equal values are required, the first at {at}: "
            f"got {k[at].item()}, expected {o[at].item()}",
            math.nan,
        )


def judge(k: Tensor, y: Tensor, o: Tensor, *, longest: int, how: Comparison | None = None, spread: Tensor | None = None) -> Verdict:
    """Accept or refuse the kernel's output `k`.

    longest: the number of terms of the operator's longest reduction, at least 1.
    how: the comparison; by default `Rounded()` for floating-point outputs and `Exact()` for integers and booleans.
    spread: how far the oracle moves when every input moves by a rounding of float32, per element. Where that is more than the
    yardstick's error the output is a difference of nearly equal numbers, and the yardstick was lucky: nobody can do better.
    A wrong shape or dtype of k is a refusal; of y or o, ValueError: those are not the kernel's doing.
    """
    k, y, o = (t.detach().cpu() for t in (k, y, o))
    _check_reference(y, o, longest)
    if k.shape != y.shape:
        return Verdict(False, f"shape {tuple(k.shape)}, expected {tuple(y.shape)}", math.nan)
    if k.dtype != y.dtype:
        return Verdict(False, f"dtype {k.dtype}, expected {y.dtype}", math.nan)
    if k.numel() == 0:
        return Verdict(True)
    if how is None:
        how = Rounded() if k.is_floating_point() else Exact()
    return how.judge(k, y, o, longest, spread)


def yardstick(reference_in_dtype: Tensor, reference_in_float32: Tensor, o: Tensor, *, longest: int) -> Tensor:
    """The better of the reference run in the working dtype and the reference run in float32 and rounded once.

    One is chosen for the whole tensor: the one with fewer values that are wrongly finite or not, then with the smaller
    relative error, each slice counting alike. Integers and booleans have no better or worse, and in float64 a float32
    result is no candidate: there the reference in the working dtype is returned.
    """
    first, second, o = (t.detach().cpu() for t in (reference_in_dtype, reference_in_float32, o))
    _check_reference(first, o, longest)
    if second.shape != first.shape:
        raise ValueError(
            f"the reference gives shape {tuple(first.shape)} in {first.dtype} and {tuple(second.shape)} in float32; "
            "its shapes must not depend on the dtype"
        )
    if not first.is_floating_point() or first.dtype == torch.float64 or first.numel() == 0:
        return first
    second = second.to(first.dtype)
    return second if _badness(second, o) < _badness(first, o) else first


def sloppy(reference_in_dtype: Tensor, y: Tensor, o: Tensor, *, longest: int) -> str | None:
    """Why the reference itself is too inaccurate by the kernel's rule (it would excuse a wrong kernel), or None."""
    verdict = judge(reference_in_dtype, y, o, longest=longest)
    return None if verdict.accepted else f"the reference fails its own check: {verdict.reason}"


def informative(
    y: Tensor, o: Tensor, *, longest: int, how: Comparison | None = None, spread: Tensor | None = None
) -> bool:
    """Whether a case can tell right from wrong: zeros fail it, and so does the mean of the oracle everywhere.

    Empty outputs, single elements and constants are never informative.
    """
    if o.numel() == 0:
        return False
    o = o.detach().cpu()
    finite = o[torch.isfinite(o)].double()
    mean = float(finite.mean()) if finite.numel() else 0.0
    if not y.is_floating_point():
        mean = round(mean)
    for value in (0, mean):
        guess = torch.full(y.shape, value, dtype=torch.float64).to(y.dtype)
        if judge(guess, y, o, longest=longest, how=how, spread=spread).accepted:
            return False
    return True


@dataclass
class _Sums:
    """What a pool remembers of the outputs of one dtype. Errors are relative to their slice and in units of eps."""

    elements: int = 0
    kernel: float = 0.0
    reference: float = 0.0
    compared: int = 0
    kernel_off: int = 0
    reference_off: int = 0


@dataclass
class Pool:
    """All 16-bit (and 8-bit) floating-point outputs of an operator together, each dtype for itself.

    A wrong divisor, a missing rounding or a truncation moves every element by less than one rounding, which no slice
    can show; over thousands of elements it does. Other dtypes are not pooled: `add` leaves them out. Keeps sums, no
    tensors. Give each output of an operator its own pool, and only outputs that `judge` accepted.
    """

    _sums: dict[torch.dtype, _Sums] = field(default_factory=dict)

    def add(self, k: Tensor, y: Tensor, o: Tensor, spread: Tensor | None = None) -> None:
        """spread: as in `judge`. What it explains is no error: an oracle as near to the middle of two numbers may be rounded to either."""
        k, y, o = (t.detach().cpu() for t in (k, y, o))
        if k.shape != o.shape or y.shape != o.shape or k.dtype != y.dtype:
            raise ValueError(
                f"cannot pool k {tuple(k.shape)} {k.dtype}, y {tuple(y.shape)} {y.dtype} and o {tuple(o.shape)}: "
                "pool only outputs that judge() accepted"
            )
        if not k.is_floating_point() or k.dtype.itemsize > 2 or k.numel() == 0:
            return
        info = torch.finfo(k.dtype)
        rounded = o.to(k.dtype).double()
        kernel, reference = k.double(), y.double()
        usual = torch.isfinite(rounded) & torch.isfinite(kernel) & torch.isfinite(reference)
        size = _rms(slices(torch.where(usual, o, 0.0)))[:, None].expand_as(slices(o)).reshape(o.shape)
        # Below the smallest normal number errors are absolute: relative ones would drown all others.
        relative = usual & (size >= info.tiny)
        normal = usual & (o.abs() >= info.tiny)
        sums = self._sums.setdefault(k.dtype, _Sums())
        sums.elements += int(relative.sum())
        unit = size[relative] * info.eps
        known = 2 * spread.nan_to_num(posinf=0.0) if spread is not None else torch.zeros_like(o)
        off, reference_off = (((t - o).abs() - known).clamp_min(0.0) for t in (kernel, reference))
        sums.kernel += float((off[relative] / unit).pow(2).sum())
        sums.reference += float((reference_off[relative] / unit).pow(2).sum())
        sums.compared += int(normal.sum())
        half = (rounded - o).abs()
        sums.kernel_off += int((off > half)[normal].sum())
        sums.reference_off += int((reference_off > half)[normal].sum())

    def verdict(self) -> Verdict | None:
        """None below SMALLEST_POOL elements of every dtype; else the first refusal, or acceptance."""
        verdicts = [_pooled(d, sums) for d, sums in self._sums.items() if sums.elements >= SMALLEST_POOL]
        return max(verdicts, key=lambda v: (not v.accepted, v.error_ratio), default=None)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bits (NaN, -0.0), whatever their strides."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    """The index of the element number `flat` of a contiguous tensor."""
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))


def _check_reference(y: Tensor, o: Tensor, longest: int) -> None:
    if longest < 1:
        raise ValueError(f"longest is {longest}; a reduction has at least 1 term")
    if y.shape != o.shape:
        raise ValueError(f"the reference has shape {tuple(y.shape)} and the oracle {tuple(o.shape)}; they must agree")
    if y.is_complex() or o.is_complex():
        raise ValueError(f"complex outputs ({y.dtype}) are not compared; pass torch.view_as_real of all three")
    if y.is_floating_point() and o.dtype != torch.float64:
        raise ValueError(f"the oracle of a floating-point output must be float64, not {o.dtype}")


def _rms(rows: Tensor) -> Tensor:
    """Per row; scaled, so that neither huge nor tiny float64 values leave the range when squared."""
    peak = rows.abs().amax(-1, keepdim=True)
    scale = torch.where((peak > 0) & torch.isfinite(peak), peak, 1.0)
    return (rows / scale).pow(2).mean(-1).sqrt() * scale.squeeze(-1)


def _same_value(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():  # the 8-bit dtypes have no comparison of their own
        a, b = a.double(), b.double()
        return (a == b) | (torch.isnan(a) & torch.isnan(b))
    return a == b


def _end_of_range(d: torch.dtype) -> tuple[float, float]:
    """The largest number of the dtype, and the one that would come after it."""
    info = torch.finfo(d)
    return info.max, info.max / (1 - info.eps / 2)


def _special_value_reason(k: Tensor, y: Tensor, o: Tensor, error: Tensor) -> str:
    wrong = torch.isinf(error)
    at = unravel(int(wrong.flatten().int().argmax()), o.shape)
    rounded = float(o[at].to(k.dtype))
    what = (
        "is not finite where it should be"
        if not math.isfinite(float(k[at]))
        else "shows neither the oracle nor the reference where that is out of range"
    )
    return (
        f"{what}: {int(wrong.sum())} of {k.numel()} elements, the first at {at}: "
        f"got {float(k[at]):.6g}, the oracle gives {rounded:.6g}, the reference {float(y[at]):.6g}"
    )


def _badness(candidate: Tensor, o: Tensor) -> tuple[int, float]:
    """Smaller is better: elements that are wrongly finite or not, then the relative error, the mean over the slices."""
    rounded, c = o.to(candidate.dtype).double(), candidate.double()
    usual = torch.isfinite(rounded) & torch.isfinite(c)
    misplaced = int((~usual & ~_same_value(c, rounded)).sum())
    expected, got = (slices(torch.where(usual, t, 0.0)) for t in (o, c))
    size = _rms(expected).clamp_min(torch.finfo(candidate.dtype).tiny)
    return misplaced, float((_rms(got - expected) / size).pow(2).mean())


def _pooled(d: torch.dtype, sums: _Sums) -> Verdict:
    kernel, reference = (math.sqrt(total / sums.elements) for total in (sums.kernel, sums.reference))
    limit = 1.6 * max(reference, 0.15)
    off, usual_off = (n / max(sums.compared, 1) for n in (sums.kernel_off, sums.reference_off))
    off_limit = 2 * usual_off + 0.005
    ratio = max(kernel / limit, off / off_limit)
    if kernel > limit:
        return Verdict(
            False,
            f"over {sums.elements} pooled {d} elements the RMS error is {kernel:.3g} eps, limit {limit:.3g} "
            f"(the reference has {reference:.3g})",
            ratio,
        )
    if off > off_limit:
        return Verdict(
            False,
            f"{off:.2%} of {sums.compared} pooled {d} elements are not the rounded oracle, limit {off_limit:.2%} "
            f"(of the reference {usual_off:.2%} are not)",
            ratio,
        )
    return Verdict(True, "", ratio)


def _bytes(t: Tensor) -> Tensor:
    plain = t.detach().cpu().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)
