"""What a simulator said beside what the device said of the same inputs, by the rule of the check, differences by name."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kdk.ops  # noqa: F401  (registers the operators)
from kdk.backends import LANGUAGES
from kdk.errors import RefusedError
from kdk.registry import OPERATORS
from kdk.torch_library import Operator
from kdk_bench.check import poisoned_memory
from kdk_bench.expectation import Expectation, Row, outputs_of
from kdk_bench.generate import Problem, problems
from kdk_bench.numerics import errors
from kdk_bench.places import Place, place
from kdk_bench.records import environment, today

AGREES, DIFFERS = "agrees", "differs"
DEVICE_WRONG, SIMULATOR_WRONG, BOTH_WRONG = "device wrong", "simulator wrong", "both wrong"
REFUSED, UNKNOWN = "refused", "unknown"
BROKEN = {DEVICE_WRONG, SIMULATOR_WRONG, BOTH_WRONG}


@dataclass(frozen=True)
class Comparison:
    """One case. outcome: agrees, both right and no further from each other than the rule lets a result be from the truth;
    differs, both right and further apart; device wrong, simulator wrong or both wrong, by the rule; refused, by either;
    unknown, the case cannot be judged.

    difference: the largest, as a share of the rule's limit; None where none was taken. other: elements with other values.
    simulated_as: the chip that the simulator took; the language's first where it does not know the device's.
    """

    row: Row
    case: str
    simulated_as: str
    outcome: str
    reason: str = ""
    difference: float | None = None
    other: int | None = None
    elements: int | None = None
    evidence: str = ""

    def as_json(self) -> dict[str, Any]:
        """A result of kdk.device-check/1."""
        row = self.row
        return {
            "op": row.op, "direction": row.direction, "implementation": row.implementation, "target": row.target, "dtype": row.dtype,
            "case": self.case, "simulated_as": self.simulated_as, "outcome": self.outcome, "reason": self.reason,
            "difference": self.difference, "other": self.other, "elements": self.elements, "evidence": self.evidence,
            "environment": environment(), "date": today(),
        }  # fmt: skip


def compare_row(row: Row, cases: int = 0) -> list[Comparison]:
    """The first `cases` of the quick tier, 0: all of them."""
    operator, language = OPERATORS[row.op], LANGUAGES[row.implementation]
    chip = row.target if row.target in language.targets else language.targets[0]
    simulator, device = Place(f"{row.implementation}@{chip}!", "cpu", "simulated"), place(row.implementation, row.target)
    found = problems(operator.op, row.direction)
    return [compare_case(operator, row, problem, chip, simulator, device) for problem in found[: cases or None]]


Results = tuple[Tensor | None, ...]


def compare_case(operator: Operator, row: Row, problem: Problem, chip: str, simulator: Place, device: Place) -> Comparison:
    """One case; whatever is raised is an outcome."""

    def ended(outcome: str, reason: str = "", figures: tuple[float | None, int | None, int | None] = (None, None, None)) -> Comparison:
        return Comparison(row, problem.name, chip, outcome, reason, *figures, device.evidence)

    try:
        expected = Expectation(operator, row, problem, 0)
        own_fault = expected.sloppy()
    except Exception as error:  # of the reference: neither simulator nor device is to blame
        return ended(UNKNOWN, f"{type(error).__name__}: {error}")
    if own_fault:
        return ended(UNKNOWN, own_fault)
    known = expected.known
    verdicts: list[str] = []
    results = []
    for who, where in (("simulated", simulator), ("on the device", device)):
        try:
            got = _call(operator, row, expected, where)
            expected.known = known  # a choice that one of them made is not the other's
            verdicts.append(expected.judge(got, {})[0])
            results.append(got)
        except RefusedError as error:
            return ended(REFUSED, f"{who}: {error.value}")
        except Exception as error:
            verdicts.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    if any(verdicts):
        outcome = BOTH_WRONG if all(verdicts) else SIMULATOR_WRONG if verdicts[0] else DEVICE_WRONG
        return ended(outcome, "; ".join(f"{who}: {text}" for who, text in zip(("simulated", "on the device"), verdicts) if text))
    figures = difference, _, _ = apart(expected, *results)
    if difference is None or difference <= 1:
        return ended(AGREES, "", figures)
    return ended(DIFFERS, "both right, and further from each other than the limit", figures)


def _call(operator: Operator, row: Row, expected: Expectation, where: Place) -> Results:
    torch_op = operator.forward if row.direction == "forward" else operator.backward
    with torch.no_grad(), poisoned_memory(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outputs_of(torch_op(*where.move(expected.call.args), impl=where.impl))


def apart(expected: Expectation, simulated: Results, measured: Results) -> tuple[float | None, int, int]:
    """(the largest difference as a share of the rule's limit, elements with other values, elements).

    Of a choice and of quantised numbers, and of what belongs to another choice, there is no such share: they are counted.
    """
    known, chosen = expected.known, set(expected.chosen or ())
    share: float | None = None
    other = elements = 0
    pairs = {
        name: (a.detach().cpu(), b.detach().cpu())
        for name, a, b in zip(expected.call.names, simulated, measured)
        if a is not None and b is not None
    }
    one_choice = all(torch.equal(*pairs[name]) for name in chosen if name in pairs)
    for i, name in enumerate(expected.call.names):
        y, o = known.yardstick[i], known.oracle[i]
        if name not in pairs or not pairs[name][0].numel():
            continue
        a, b = (t.double() for t in pairs[name])
        same = (a == b) | (a.isnan() & b.isnan())
        other, elements = other + int((~same).sum()), elements + same.numel()
        if y is None or o is None or not y.is_floating_point() or name in known.quantised or name in chosen or not one_choice:
            continue
        limit = errors(pairs[name][1], y, o, expected.longest[i], known.spread[i]).limit
        gap = torch.where(same, 0.0, (a - b).abs() / limit.reshape(a.shape))
        # Where the oracle is out of range either of two values is right: the rule asks nothing more of them.
        gap = gap[torch.isfinite(a) & torch.isfinite(b)]
        share = max(share or 0.0, float(gap.max()) if gap.numel() else 0.0)
    return share, other, elements
