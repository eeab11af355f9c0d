"""Two cores (LNC2): they take turns, meet at barriers, and must not touch shared memory in a race."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import access
from .errors import build_error, need, refuse
from .memory import SHARED
from .tensor import NkiTensor

if TYPE_CHECKING:
    from .core import Core
    from .memory import Storage

MEETING_TIMEOUT = 600.0  # seconds of waiting for a core that neither comes nor ends


class Pair:
    """What the two cores of one launch share. The core that holds `turn` runs; waiting hands the turn over."""

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.shared: list[Storage] = []
        self.meetings = 0
        self.waiting: tuple[Any, Any] | None = None  # point and payload of the core that came first
        self.answers: dict[int, Any] = {}
        self.ended = False

    def meet(self, point: tuple, payload: Any = None, ordered: Storage | None = None) -> Any:
        """Wait until the other core is at the same point; returns its payload. `ordered` is what a barrier orders."""
        number = self.meetings
        if self.waiting is None:
            self.waiting = (point, payload)
            came = self.turn.wait_for(lambda: self.meetings > number or self.ended, MEETING_TIMEOUT)
            if not came or self.meetings == number:
                raise build_error("lnc", f"the other core ended without reaching {point}")
            return self.answers.pop(number)
        other_point, other_payload = self.waiting
        if other_point != point:
            refuse("lnc", f"one core is at {other_point}, the other at {point}")
        if self.ended:
            raise build_error("lnc", f"the other core ended without reaching {point}")
        self.waiting = None
        self.answers[number] = payload
        self.meetings += 1
        if ordered is not None:
            ordered.shared_accesses = None
        self.turn.notify_all()
        return other_payload

    def end(self) -> None:
        """A core has ended: a core that still waits, or will, waits for nobody."""
        self.ended = True
        self.turn.notify_all()

    def storage(self, core: Core, create: Callable[[], Storage], shape: tuple[int, ...], dtype: str) -> Storage:
        """The n-th shared_hbm allocation of each core is one tensor."""
        n = core.shared_count
        core.shared_count += 1
        if n == len(self.shared):
            self.shared.append(create())
        found = self.shared[n]
        same = (found.shape, found.dtype) == (shape, dtype)
        need(
            same,
            "lnc",
            f"shared_hbm tensor {n} is {found.shape} {found.dtype} on one core and {shape} {dtype} on the other",
        )
        return found


READ, WROTE = 1, 2


def check_access(core: Core, writes: Sequence[NkiTensor], reads: Sequence[NkiTensor]) -> None:
    """Find elements of shared memory that both cores touch, one of them writing, without a barrier in between."""
    if core.pair is None:
        return
    for tensors, bit in ((reads, READ), (writes, WROTE)):
        for t in tensors:
            if t.buffer is SHARED:
                _note(core, t, bit)


def _note(core: Core, t: NkiTensor, bit: int) -> None:
    storage = t.storage
    if storage.shared_accesses is None:
        storage.shared_accesses = np.zeros(storage.total, np.uint8)
    if t.dynamic is None:
        start, strides = access.layout(t)
        shape = (*t.shape, t.itemsize)
        marks = np.ndarray(shape, np.uint8, storage.shared_accesses, start, (*strides, 1))  # type: ignore[arg-type]
        _check(core, t, marks, bit)
        marks |= np.uint8(bit << (2 * core.index))
    elif core.data:
        addresses, inside = access.gather_addresses(t, skip=True)
        at = (addresses[inside][..., None] * t.itemsize + np.arange(t.itemsize)).reshape(-1)
        _check(core, t, storage.shared_accesses[at], bit)
        storage.shared_accesses[at] |= np.uint8(bit << (2 * core.index))


def _check(core: Core, t: NkiTensor, marks: np.ndarray, bit: int) -> None:
    other = 1 - core.index
    if ((marks >> (2 * other)) & (READ | WROTE if bit == WROTE else WROTE)).any():
        what = "writes" if bit == WROTE else "reads"
        refuse(
            "lnc",
            f"core {core.index} {what} elements of {t} that core {other} touched since the last core_barrier on it",
        )
