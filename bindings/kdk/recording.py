"""What ran: counters that are always on, and `record()`, the difference between two moments."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple


class Key(NamedTuple):
    """What is counted. reason: why not the usual.

    how: device, simulated, inlined (plain torch, no call of its own), captured (traced into a compiled graph), refused.
    """

    op: str
    direction: str
    implementation: str
    how: str
    target: str
    reason: str


_LOCK = threading.Lock()  # backward runs in threads of its own; an unlocked += loses counts


class Tally:
    """The number of calls of one key so far."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def add(self) -> int:
        """Count one call; the number of them so far."""
        with _LOCK:
            self.calls = calls = self.calls + 1
        return calls


_TALLIES: dict[Key, Tally] = {}


def tally(key: Key) -> Tally:
    """The one tally of a key: who counts often keeps it."""
    with _LOCK:
        return _TALLIES.setdefault(key, Tally())


def inlined(op: str, reason: str) -> bool:
    """Count plain torch in an operator's place."""
    tally(Key(op, "forward", "reference", "inlined", "", reason)).add()
    return True


# torch._dynamo.assume_constant_result sets this and takes a second to import: the function runs while tracing, and leaves
# no trace in the graph. (Counters touched by traced code would be guarded, and recompile.)
inlined._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _now() -> Counter[Key]:
    with _LOCK:
        return Counter({key: tally.calls for key, tally in _TALLIES.items()})


@dataclass(frozen=True)
class Row:
    """One line of a record."""

    op: str
    direction: str
    implementation: str
    how: str
    target: str
    reason: str
    calls: int


class record:
    """`with kdk.record() as r`: afterwards (or meanwhile) `r.rows` says what ran how often, on which grounds.

    Process-wide, so that backward threads count. An operator that was inlined (use("reference"), torch.compile) or captured is
    compiled with its neighbours: it is counted when it is traced, not each time the compiled code runs.
    """

    def __enter__(self) -> record:
        self._before = _now()
        self._after: Counter[Key] | None = None
        return self

    def __exit__(self, *exc: object) -> None:
        self._after = _now()

    @property
    def rows(self) -> list[Row]:
        """Sorted by operator; refusals after what ran instead."""
        changed = (_now() if self._after is None else self._after) - self._before
        return [Row(*key, calls=changed[key]) for key in sorted(changed, key=lambda k: (k.op, k.direction != "forward", k))]

    def calls(self, op: str, direction: str = "forward", *, how: str = "", implementation: str = "") -> int:
        """How many calls of an operator ran (refusals left out), by one implementation or in one way if named."""
        return sum(
            row.calls
            for row in self.rows
            if (row.op, row.direction) == (op, direction)
            and (row.how == how if how else row.how != "refused")
            and implementation in ("", row.implementation)
        )

    def __str__(self) -> str:
        return "\n".join(
            f"{r.op}.{r.direction}: {r.implementation} {r.how}{f' as {r.target}' if r.target else ''} x{r.calls}"
            + (f" ({r.reason})" if r.reason else "")
            for r in self.rows
        )
