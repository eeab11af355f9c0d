"""When is an output right that is no rounded number: a discrete choice, quantised values. On tensors only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kdk.compare import Choice
from kdk_bench.numerics import Verdict, errors, floors, unravel

DIVISION = 4 * torch.finfo(torch.float32).eps
"""Of the value: its division by the scale (or multiplication by the reciprocal) and the scale's own rounding, in float32."""


# ---- a choice ---------------------------------------------------------------------------------------------------------


def tolerance(longest: int) -> float:
    """By how much a score may be off, relative to its size, that is computed in float32 with sums of this length."""
    return floors(torch.float32, longest).worst


def judge_choice(
    how: Choice, arguments: Mapping[str, Any], chosen: Mapping[str, Tensor | None], like: Mapping[str, Tensor], longest: int
) -> str:
    """Why a choice is wrong, or "". arguments: in float64. like: the reference's choice, for shapes and dtypes."""
    here: dict[str, Tensor] = {}
    for name in how.outputs:
        t, expected = chosen[name], like[name]
        if t is None:
            return f"{name}: missing"
        if t.shape != expected.shape or t.dtype != expected.dtype:
            return f"{name}: {t.dtype} {tuple(t.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        here[name] = t.detach().cpu()
    names = ", ".join(how.outputs)
    if all(t.numel() == 0 for t in here.values()):
        return ""
    try:
        right = how.valid(dict(arguments), here, tolerance(longest))
    except (IndexError, RuntimeError, ValueError) as error:  # a value that points nowhere
        return f"{names}: the choice cannot be read: {' '.join(str(error).split())[:200]}"
    if bool(right.all()):
        return ""
    row = unravel(int((~right).flatten().int().argmax()), right.shape)
    first = how.outputs[0]
    values = here[first][row].flatten()[:8].tolist()
    best = like[first][row].flatten()[:8].tolist()
    return f"{names}: {int((~right).sum())} of {right.numel()} rows choose wrongly, the first at {row}: {values}, the reference {best}"


# ---- quantised values -------------------------------------------------------------------------------------------------


def spread_over(scale: Tensor, shape: torch.Size) -> Tensor:
    """The scale of every element: its dimensions are the leading ones, a smaller one is shared by neighbours."""
    s = scale.reshape(*scale.shape, *[1] * (len(shape) - scale.dim()))
    for d, size in enumerate(shape):
        if s.shape[d] != size and s.shape[d]:
            s = s.repeat_interleave(-(-size // s.shape[d]), d).narrow(d, 0, size)
    return s


def _numbers(dtype: torch.dtype) -> Tensor:
    """All finite values of a dtype of 8 bits, in order."""
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).double()
    return every[torch.isfinite(every)].unique()


def _halves(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Half the distance to the next number below and above; infinite at both ends of the format, where values saturate."""
    table = _numbers(dtype)
    at = torch.searchsorted(table, q.contiguous()).clamp_max(len(table) - 1)
    below = (q - table[(at - 1).clamp_min(0)]) / 2
    above = (table[(at + 1).clamp_max(len(table) - 1)] - q) / 2
    largest = table[-1]  # of int8 -127 is an end too: many clamp there
    return torch.where(q <= -largest, torch.inf, below), torch.where(q >= largest, torch.inf, above)


class Dequantised:
    """What a quantised output is held against: the oracle's values, and what the rule for floating-point outputs allows them.

    values: before quantisation, from float64; in_float32: the same from float32. q, scale: the oracle's.
    """

    def __init__(self, values: Tensor, in_float32: Tensor, spread: Tensor | None, q: Tensor, scale: Tensor, longest: int) -> None:
        self.values, self.q, self.scale = values.double(), q, scale
        near = in_float32.float()
        allowed = errors(near, near, self.values, longest, spread).limit if q.numel() else torch.zeros(q.shape, dtype=torch.float64)
        self.slack = allowed + DIVISION * self.values.abs()

    def judge(self, q: Tensor, scale: Tensor) -> tuple[Verdict, str]:
        """The verdict on a kernel's q with its own scale, and how many elements are not the oracle's."""
        q, scale = q.detach().cpu(), scale.detach().cpu()
        if q.shape != self.q.shape or q.dtype != self.q.dtype or scale.shape != self.scale.shape:
            got, expected = (f"{a.dtype} {tuple(a.shape)} with scale {tuple(b.shape)}" for a, b in ((q, scale), (self.q, self.scale)))
            return Verdict(False, f"{got}, expected {expected}", torch.nan), ""
        if q.numel() == 0:
            return Verdict(True), ""
        s, number, oracle = spread_over(scale.double(), q.shape), q.double(), self.q.double()
        usual = torch.isfinite(s) & torch.isfinite(self.values) & torch.isfinite(spread_over(self.scale.double(), q.shape))
        beyond = self._beyond(number, s, q.dtype)
        over = torch.where(s == 0, torch.where(number == oracle, 0.0, torch.inf), beyond / self.slack)
        over = torch.where(torch.isfinite(number), torch.nan_to_num(over, nan=0.0, posinf=torch.inf), torch.inf)
        over = torch.where(usual, over, 0.0)
        worst = float(over.max())
        different = int(((number != oracle) & usual).sum())
        note = f"{different} of {q.numel()} elements are a quantum from the oracle's" if different else ""
        if worst <= 1:
            return Verdict(True, "", worst), note
        at = unravel(int(over.argmax()), q.shape)
        wrong = int((over > 1).sum())
        reason = (
            f"{wrong} of {q.numel()} elements are not the nearest quantum, the worst at {at}: {float(number[at]):.6g} * "
            f"{float(s[at]):.6g} for {float(self.values[at]):.6g}, the oracle has {float(oracle[at]):.6g}"
        )
        return Verdict(False, reason, worst), note

    def _beyond(self, number: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
        """How much further than half a quantum a number lies from what it stands for."""
        below, above = _halves(torch.where(torch.isfinite(number), number, 0.0), dtype)
        off = self.values - number * s
        return torch.where(off < 0, -off - below * s, off - above * s).clamp_min(0.0)

    def as_values(self, q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a kernel's numbers stand for, less the half quantum that rounding takes, and the oracle's in float32 and float64."""
        s, number = spread_over(scale.detach().cpu().double(), q.shape), q.detach().cpu().double()
        got = self.values + torch.sign(number * s - self.values) * self._beyond(number, s, q.dtype)
        return torch.where(torch.isfinite(number * s), got, number * s).float(), self.values.float(), self.values

    def informative(self) -> bool:
        """Whether zeros, and the mean everywhere, would fail."""
        if self.q.numel() == 0:
            return False
        mean = self.q.double().nan_to_num(0.0).mean().to(self.q.dtype if self.q.is_floating_point() else torch.float64)
        guesses = (torch.zeros(()), mean.double().round() if not self.q.is_floating_point() else mean.double())
        return not any(
            self.judge(torch.full(self.q.shape, float(g), dtype=torch.float64).to(self.q.dtype), self.scale)[0].accepted for g in guesses
        )
