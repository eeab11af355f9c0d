"""Likely causes of a wrong output that show in the output itself.

A cause is a guess, and made in the open: each hypothesis says what the output would be if it were true, and is taken
when the output is that.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

CAUSES = (
    "unmasked tail",
    "ignored stride",
    "missing cast",
    "lost accumulation",
    "wrong axis",
    "stale buffer",
    "swapped operands",
    "skipped tile",
    "constant output",
    "returns its input",
    "not finite",
    "wrong scale",
    "off by one",
    "wrong index",
    "wrong formula",
    "unknown",
)
# Tiles to look for when the caller does not know those of the kernel, the largest first.
TILES = (1024, 512, 256, 128, 64, 32, 16, 8)
# Bits of the significand, the leading one included, of the dtypes through which a value may have gone by mistake.
NARROWER = {
    torch.float64: {"float32": 24, "float16 or TF32": 11, "bfloat16": 8},
    torch.float32: {"float16 or TF32": 11, "bfloat16": 8},
    torch.float16: {"bfloat16": 8},
}
# A box counts as wrong altogether above this share: some elements come out right by chance.
DENSE = 0.8
# Fewer elements than this agree with almost anything.
FEW = 4

Box = tuple[tuple[int, int], ...]
Reference = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass
class Case:
    """The comparison, prepared for the hypotheses. All in float64, except the original `output`."""

    output: Tensor
    k: Tensor
    o: Tensor
    limit: Tensor  # per element
    wrong: Tensor
    stands_out: bool  # some element is beyond its limit; else the RMS or a pool refused the output
    box: Box
    inputs: Mapping[str, Tensor]
    longest: int
    tiles: Sequence[int]
    previous: Tensor | None
    reference: Reference | None
    eps: float = field(init=False)
    sample: Tensor = field(init=False)  # flat indices of some wrong elements, to drop most hypotheses early

    def __post_init__(self) -> None:
        self.eps = torch.finfo(self.output.dtype).eps if self.output.is_floating_point() else 0.0
        wrong = self.wrong.flatten().nonzero().squeeze(1)
        self.sample = wrong[:: max(1, wrong.numel() // 256)]

    def explains(self, h: Tensor, where: Tensor | None = None) -> bool:
        """Whether the output is `h` (NaN: no statement) wherever `where` holds, and that is no coincidence.

        It must cover most of the wrong elements, and come much closer to the output than the oracle does.
        """
        stated = ~torch.isnan(h)
        if where is not None:
            stated = stated & where
        some = stated.flatten()[self.sample]
        if some.any() and self._agrees(h, self.sample)[some].double().mean() < 0.9:
            return False
        telling = stated & self.wrong
        if int(telling.sum()) < max(FEW, 0.25 * int(self.wrong.sum())):
            return False
        agrees = self._agrees(h, slice(None)).reshape(h.shape)
        if agrees[stated].double().mean() < 0.99 or agrees[telling].double().mean() < 0.99:
            return False
        distance, expected = (self.k - h).abs(), (self.k - self.o).abs()
        both = telling & torch.isfinite(distance) & torch.isfinite(expected)
        return not both.any() or bool(distance[both].median() < 0.5 * expected[both].median())

    def _agrees(self, h: Tensor, at: Tensor | slice) -> Tensor:
        h, k, limit = (t.flatten()[at] for t in (h, self.k, self.limit))
        tolerance = torch.maximum(limit, torch.where(torch.isfinite(h), 2 * self.eps * h.abs(), 0.0))
        return ((k - h).abs() <= tolerance) | (k == h)

    def inside(self) -> Tensor:
        """The mask of the box."""
        mask = torch.zeros_like(self.wrong)
        mask[tuple(slice(low, high) for low, high in self.box)] = True
        return mask

    def cut_axes(self) -> list[int]:
        """The axes along which only a part is wrong."""
        return [a for a, (low, high) in enumerate(self.box) if high - low < self.k.shape[a]]

    def dense(self) -> bool:
        return bool(self.wrong[self.inside()].double().mean() >= DENSE)

    def aligned_tile(self, axis: int) -> int | None:
        """The tile of whose multiples the box along `axis` is made, the end of the axis counting as one."""
        (low, high), size = self.box[axis], self.k.shape[axis]
        for tile in self.tiles:
            if tile < size and low % tile == 0 and (high % tile == 0 or high == size):
                return tile
        return None


Finding = tuple[str, str]  # a cause, and the details


# The hypotheses: each returns a cause and the details, or None


def returns_input(case: Case) -> Finding | None:
    for name, t in case.inputs.items():
        if t.numel() != case.k.numel() or t.shape.numel() == 1:
            continue
        same = t.to(case.output.dtype).reshape(case.k.shape).double()
        if not case.explains(same, case.wrong) or not torch.equal(same[case.wrong], case.k[case.wrong]):
            continue
        if case.k[case.wrong].unique().numel() > 1:
            part = "" if torch.equal(same, case.k) else " in the wrong region"
            return "returns its input", f"the output equals {name}{part}"
    return None


def constant(case: Case) -> Finding | None:
    value = case.k.flatten()[0]
    if case.k.numel() < FEW or not torch.isfinite(value) or not (case.k == value).all():
        return None
    finite = case.o[torch.isfinite(case.o)]
    mean = float(finite.mean()) if finite.numel() else math.nan
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    what = ", the mean of the expected values" if value != 0 and abs(value - mean) <= 2 * case.eps * scale else ""
    return "constant output", f"every element is {float(value):.6g}{what}"


def shifted(t: Tensor, axis: int, step: int) -> Tensor:
    """Element i is element i - step of t along the axis, NaN beyond its ends."""
    moved = torch.full_like(t, math.nan)
    length = t.shape[axis] - abs(step)
    if length > 0:
        moved.narrow(axis, max(step, 0), length).copy_(t.narrow(axis, max(-step, 0), length))
    return moved


def shift(case: Case) -> Finding | None:
    for axis, step in itertools.product(range(case.k.dim()), (1, -1, 2, -2)):
        # Along a short axis most of the elements would go without a statement.
        if case.k.shape[axis] >= 4 * abs(step) and case.explains(shifted(case.o, axis, step)):
            return "off by one", f"element i along axis {axis} holds what belongs at i{-step:+d}"
    return None


def permuted(case: Case) -> Finding | None:
    for a, b in itertools.combinations(range(case.k.dim()), 2):
        turned = case.o.transpose(a, b)
        if turned.shape == case.o.shape and case.explains(turned):
            return "wrong axis", f"the output is the expected one with axes {a} and {b} exchanged"
        if case.explains(turned.reshape(case.o.shape)):
            return "ignored stride", f"the elements are in the order of a layout with axes {a} and {b} exchanged"
    for axis in range(case.k.dim()):
        if case.explains(case.o.flip(axis)):
            return "wrong axis", f"the output is the expected one, reversed along axis {axis}"
    return None


def sign_or_inverse(case: Case) -> Finding | None:
    if case.explains(-case.o):
        return "swapped operands", "the output is minus the expected one"
    if case.explains(1 / case.o):
        return "swapped operands", "the output is the reciprocal of the expected one"
    return None


def narrowed(case: Case) -> Finding | None:
    """Every value has the few bits of a narrower dtype, or was cut off where it should be rounded."""
    if not case.output.is_floating_point():
        return None
    d = case.output.dtype
    rounded = case.o.to(d).double()
    finite = torch.isfinite(case.k) & torch.isfinite(rounded)
    for name, bits in NARROWER.get(d, {}).items():
        if finite.any() and _has_bits(case.k[finite], bits) and not _has_bits(rounded[finite], bits):
            return "missing cast", f"every value fits into the {bits}-bit significand of {name}"
    ulp = torch.finfo(d).eps * case.o.abs()
    off = finite & (case.k != rounded)
    cut = (case.k.abs() <= case.o.abs()) & ((case.k - case.o).abs() <= ulp)
    if d.itemsize <= 2 and off.sum() > max(FEW, 0.25 * off.numel()) and cut[finite].double().mean() > 0.99:
        return "missing cast", "every value is cut off towards zero, not rounded to nearest"
    return None


def not_finite(case: Case) -> Finding | None:
    bad = case.k[case.wrong & ~torch.isfinite(case.k)]
    if not bad.numel():
        return None
    nans = int(torch.isnan(bad).sum())
    if case.wrong.all() and nans == case.k.numel():
        return "skipped tile", "every value is NaN: as if nothing was written"
    return "not finite", f"{nans} NaN and {bad.numel() - nans} infinite values that should not be there"


def biased(case: Case) -> Finding | None:
    """No element stands out, but together they are too large or too small."""
    if case.stands_out:
        return None
    k, o = _usable(case)
    factor, error = _factor(k.flatten(), o.flatten(), 0)
    if abs(factor - 1) <= 6 * error:
        return None
    for axis in reversed(range(k.dim())):
        if _varies(k, o, axis):
            return "lost accumulation", f"each slice along axis {axis} by its own factor, {float(factor):.7g} overall"
    return "wrong scale", f"over all elements the output is {float(factor):.7g} times the expected one"


def scaled(case: Case) -> Finding | None:
    """The output is the expected one times a factor: one number, one per slice, or one per row times one per column."""
    k, o = _usable(case)
    overall = float(_factor(k.flatten(), o.flatten(), 0)[0])
    by_one_number = case.explains(overall * case.o)
    for axis in reversed(range(k.dim())):
        if k.shape[axis] < 8 or k.numel() == k.shape[axis] or (by_one_number and not _varies(k, o, axis)):
            continue
        factor = _factor(k, o, axis)[0]
        if not case.explains(factor * case.o):
            continue
        if (found := _from_input(factor, case)) is not None:
            return found
        low, high = float(factor.nan_to_num(1).min()), float(factor.nan_to_num(1).max())
        if low <= 0:
            continue  # no reduction gone wrong changes signs
        if low < 1 < high and max(high - 1, 1 - low) < 2.0**-8:
            return "missing cast", f"each slice along axis {axis} by a factor near 1, as if that were rounded to bfloat16"
        # Whatever lies beyond the end adds to a normaliser that is divided by; what is lost is missing there.
        if high <= 1 and k.shape[axis] & (k.shape[axis] - 1):
            return "unmasked tail", f"each slice along axis {axis} is too small, by {low:.6g} to {high:.6g}"
        return "lost accumulation", f"each slice along axis {axis} by its own factor, {low:.6g} to {high:.6g}"
    if by_one_number:
        named = _named_factor(overall, case)
        if not named and 2.0**-13 < abs(overall - 1) < 2.0**-8:
            return "missing cast", f"the output is {overall:.7g} times the expected one, as by one factor rounded to bfloat16"
        return "wrong scale", f"the output is {overall:.7g} times the expected one{named}"
    if k.dim() > 1 and (product := _separable(case)) is not None and case.explains(product):
        return "wrong axis", "output / expected is a factor per row times a factor per column"
    return None


def imprecise(case: Case) -> Finding | None:
    """Errors everywhere, unbiased, as large as one rounding to a narrower dtype, or as a few to the output's own."""
    usable = torch.isfinite(case.k) & torch.isfinite(case.o) & (case.o != 0)
    relative = ((case.k - case.o) / case.o)[usable]
    if relative.numel() < 8 or not case.output.is_floating_point():
        return None
    size = float(relative.abs().median())
    if size == 0 or abs(float(relative.sign().mean())) >= 0.3:
        return None
    own = torch.finfo(case.output.dtype).eps
    far = float((case.k - case.o)[usable].abs().max()) > 16 * own * float(case.o[usable].abs().max())
    if case.output.dtype.itemsize <= 2 and size < own and not far and (relative.abs() < 6 * own).double().mean() > 0.95:
        name = str(case.output.dtype).removeprefix("torch.")
        return "missing cast", f"the errors are those of several roundings to {name}: intermediate values were rounded"
    if case.wrong.double().mean() < 0.1:
        return None
    options = NARROWER.get(case.output.dtype, {})
    for name, bits in sorted(options.items(), key=lambda option: abs(math.log(size / (0.17 * 2.0 ** (1 - option[1]))))):
        eps = 2.0 ** (1 - bits)
        if 0.05 * eps < size < 0.7 * eps and (relative.abs() < 4 * eps).double().mean() > 0.95:
            return "missing cast", f"the errors are as large as a rounding to the {bits}-bit significand of {name}"
    return None


def _has_bits(t: Tensor, bits: int) -> bool:
    mantissa = torch.frexp(t).mantissa * 2.0**bits
    return bool((mantissa == mantissa.round()).all())


def _named_factor(factor: float, case: Case) -> str:
    n = case.longest
    candidates = {"2": 2.0, "ln 2": math.log(2), "the square root of 2": math.sqrt(2)}
    if n > 1:
        for name, value in ((f"{n}/{n - 1}", n / (n - 1)), (f"{n}, the longest reduction", float(n))):
            candidates |= {name: value, f"the square root of {name}": math.sqrt(value)}
    for name, value in candidates.items():
        for text, c in ((name, value), (f"1 / ({name})", 1 / value)):
            # A tenth of the distance to 1, so that n/(n-1) is not read into any small error.
            if abs(factor - c) <= min(1e-3 * c, 0.1 * abs(c - 1)):
                return f": {text}"
    return ""


def _usable(case: Case) -> tuple[Tensor, Tensor]:
    usable = torch.isfinite(case.k) & torch.isfinite(case.o)
    return torch.where(usable, case.k, 0.0), torch.where(usable, case.o, 0.0)


def _factor(k: Tensor, o: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Least squares k = factor * o along the axis, and its standard error, for errors that grow with the values."""
    square = (o * o).sum(axis, keepdim=True)
    factor = (k * o).sum(axis, keepdim=True) / square
    return factor, (o * (k - factor * o)).pow(2).sum(axis, keepdim=True).sqrt() / square


def _varies(k: Tensor, o: Tensor, axis: int) -> bool:
    """Whether the factors of the slices along the axis differ by more than their errors and a sum's rounding."""
    if k.numel() == k.shape[axis] or k.shape[axis] < 8:
        return False
    factor, error = _factor(k, o, axis)
    noise = error.pow(2) + (math.sqrt(k.shape[axis]) * torch.finfo(torch.float32).eps) ** 2
    spread = (factor - factor.nanmedian()).pow(2) / noise
    return float(spread.nanmean()) > 4


def _from_input(factor: Tensor, case: Case) -> Finding | None:
    """The factors are an input, its reciprocal, or it and its neighbour: applied twice, not at all, or shifted."""
    f = factor.flatten()
    for name, t in case.inputs.items():
        if t.numel() != f.numel() or not t.is_floating_point():
            continue
        v = t.double().flatten()
        readings = (
            ("wrong scale", f"the output is the expected one times {name}", v),
            ("wrong scale", f"the output is the expected one divided by {name}", 1 / v),
            ("off by one", f"index i of {name} was read at i-1", v.roll(1) / v),
            ("off by one", f"index i of {name} was read at i+1", v.roll(-1) / v),
        )
        for cause, details, value in readings:
            known = torch.isfinite(value) & torch.isfinite(f)
            if known.any() and ((f - value).abs() <= 1e-2 * value.abs())[known].double().mean() > 0.9:
                return cause, details
    return None


def _separable(case: Case) -> Tensor | None:
    """The oracle times the best product of a factor per row and a factor per column, by medians of logarithms."""
    k, o = (t.reshape(-1, t.shape[-1]) for t in (case.k, case.o))
    ratio = k / o
    if min(ratio.shape) < 4 or not (ratio > 0).double().mean() > 0.95:
        return None
    log = torch.where((ratio > 0) & torch.isfinite(ratio), ratio, math.nan).log()
    rows, columns = torch.zeros_like(log[:, :1]), torch.zeros_like(log[:1])
    for _ in range(3):
        rows = (log - columns).nanmedian(1, keepdim=True).values
        columns = (log - rows).nanmedian(0, keepdim=True).values
    return ((rows + columns).exp() * o).reshape(case.k.shape)
