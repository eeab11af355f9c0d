"""Kills per operator, direction and language, and what must hold."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from kdk_bench.mutation.explained import EXPLAINED
from kdk_bench.mutation.mutants import Mutant
from kdk_bench.mutation.trial import Trial
from kdk_bench.mutation.workers import Work

LEAST_OVERALL = 0.95  # of the mutants that are not explained
LEAST_PER_KERNEL = 0.90  # of an operator in a language, both directions together
MOST_EXPLAINED = 0.05
LEAST_MUTANTS = 20  # that count, of an operator in a direction and a language
LEAST_DIAGNOSED = 0.60

# The causes that name a class of faults. Several where one fault looks different by where it is planted: a bound one too low
# shows as a shift, as a tail, or as a term that a sum lost.
CAUSES: dict[str, tuple[str, ...]] = {
    "constant": ("wrong scale", "wrong formula"),
    "operator": ("wrong scale", "wrong formula"),
    "comparison": ("off by one", "unmasked tail", "lost accumulation"),
    "dropped mask": ("unmasked tail", "not finite"),
    "wrong axis": ("wrong axis",),
    "off-by-one bound": ("off by one", "unmasked tail", "lost accumulation", "skipped tile"),
    "missing cast": ("missing cast",),
    "lost accumulation": ("lost accumulation",),
    "stale tile": ("stale buffer", "skipped tile", "lost accumulation"),
    "wrong stride": ("ignored stride",),
    "wrong index": ("off by one", "stale buffer"),
    "swapped operands": ("swapped operands", "wrong formula"),
    "skipped last tile": ("skipped tile", "lost accumulation"),
    "missing residual term": ("wrong formula", "wrong scale"),
}
# Any class, planted in the condition of a branch: the other way is another formula.
OTHER_WAY = ("wrong formula", "wrong scale")
# Any class, planted in the arithmetic of positions: the values come from, or go to, the wrong place, or never come or go.
MISPLACED = ("wrong index", "ignored stride", "off by one", "stale buffer", "skipped tile", "unmasked tail", "lost accumulation")


class Totals:
    """Counts over some mutants."""

    def __init__(self, trials: Iterable[tuple[Mutant, Trial]]) -> None:
        counting = [(m, t) for m, t in trials if t.kill != "stillborn"]
        self.mutants = len(counting)
        self.kills = Counter(t.kill for _, t in counting if t.kill)
        survivors = [m for m, t in counting if not t.kill]
        self.explained = sum(m.key in EXPLAINED for m in survivors)
        self.survivors = [m for m in survivors if m.key not in EXPLAINED]

    @property
    def rate(self) -> float:
        judged = self.mutants - self.explained
        return sum(self.kills.values()) / judged if judged else 1.0

    def cells(self) -> list[str]:
        kills = [str(self.kills[kind]) for kind in ("numerics", "sanitizer", "crash")]
        return [str(self.mutants), *kills, str(self.explained), str(len(self.survivors)), f"{self.rate:.1%}"]


def show(works: list[Work], console: Console) -> None:
    """The table, and how well the diagnosis did."""
    table = Table("operator", "direction", "language", "mutants", "numerics", "sanitizer", "crash", "explained", "survived", "killed")
    for work in works:
        table.add_row(work.unit.op, work.unit.direction, work.unit.language, *Totals(work.trials).cells())
    table.add_section()
    table.add_row("all", "", "", *Totals(_all(works)).cells())
    console.print(table)
    right, total = diagnosed(_all(works))
    if total:
        console.print(f"the first guess names the planted class for {right} of {total} mutants killed by numerics, {right / total:.1%}")


def _all(works: list[Work]) -> list[tuple[Mutant, Trial]]:
    return [pair for work in works for pair in work.trials]


def diagnosed(trials: Iterable[tuple[Mutant, Trial]]) -> tuple[int, int]:
    """Of the mutants that wrong values killed: how many the first guess explains, and how many there are."""
    guesses = [(m, t.cause) for m, t in trials if t.kill == "numerics" and t.cause]
    return sum(is_right(m, cause) for m, cause in guesses), len(guesses)


def is_right(mutant: Mutant, cause: str) -> bool:
    """Whether a cause names what was planted."""
    named = CAUSES[mutant.kind] + (MISPLACED if mutant.addressing else ()) + (OTHER_WAY if mutant.branch else ())
    return cause in named


def problems(works: list[Work], candidates: set[str]) -> list[str]:
    """What does not hold. candidates: the keys of every mutant of the units, those that were not tried included."""
    found = []
    for work in works:
        if work.baseline is not None and work.baseline.kill:
            found.append(f"{work.unit}: the unchanged kernel fails: {work.baseline.reason}")
        if work.counting() < min(LEAST_MUTANTS, work.wanted):
            found.append(f"{work.unit}: only {work.counting()} mutants count, {min(LEAST_MUTANTS, work.wanted)} must")
    trials = _all(works)
    totals = Totals(trials)
    if totals.rate < LEAST_OVERALL:
        found.append(f"{totals.rate:.1%} of the mutants are killed, at least {LEAST_OVERALL:.0%} must be")
    if totals.explained > MOST_EXPLAINED * totals.mutants:
        found.append(f"{totals.explained} of {totals.mutants} mutants are explained, at most {MOST_EXPLAINED:.0%} may be")
    kernels: dict[str, list[tuple[Mutant, Trial]]] = defaultdict(list)
    for work in works:
        kernels[f"{work.unit.op} {work.unit.language}"] += work.trials
    for name, own in kernels.items():
        if (rate := Totals(own).rate) < LEAST_PER_KERNEL:
            found.append(f"{name}: {rate:.1%} of the mutants are killed, at least {LEAST_PER_KERNEL:.0%} must be")
    right, total = diagnosed(trials)
    if right < LEAST_DIAGNOSED * total:
        found.append(f"the first guess is right for {right / total:.1%}, at least {LEAST_DIAGNOSED:.0%} must be")
    return found + _stale(works, candidates)


def _stale(works: list[Work], candidates: set[str]) -> list[str]:
    ran = {str(work.unit) for work in works}
    killed = {m.key: t.kill for m, t in _all(works) if t.kill}
    found = []
    for key in EXPLAINED:
        if key.partition(" | ")[0] not in ran:
            continue
        if key not in candidates:
            found.append(f"explained, but there is no such mutant any more: {key}")
        elif key in killed:
            found.append(f"explained, but killed ({killed[key]}): {key}")
    return found
