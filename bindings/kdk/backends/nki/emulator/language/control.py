"""nki.language: the launch grid, loops, and sizes of the hardware."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import access
from ..core import Loop, current, generation
from ..errors import build_error, call_site, need, refuse
from ..memory import PARTITIONS, PSUM, PSUM_BANK, SBUF, SBUF_BYTES, psum_banks
from ..objects import NKIObject, VirtualRegister
from ..tensor import NkiTensor, is_hbm

MOST_ITERATIONS = 1 << 20  # a while_loop that runs longer is taken for endless


class _TileSize(NKIObject):
    """Sizes of the hardware."""

    pmax = PARTITIONS
    psum_bank_fmax = psum_fmax = PSUM_BANK // 4
    psum_bank_fmax_bytes = PSUM_BANK
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512
    # not documented: the least alignment with which every dtype works
    psum_min_align = sbuf_min_align = 4

    @property
    def psum_num_banks(self) -> int:
        return psum_banks(generation())

    @property
    def sbuf_fmax_bytes(self) -> int:
        return SBUF_BYTES[generation()]

    @property
    def sbuf_fmax(self) -> int:
        return self.sbuf_fmax_bytes // 4

    @property
    def sbuf_size_bytes(self) -> int:
        return self.sbuf_fmax_bytes * PARTITIONS

    total_available_sbuf_size = sbuf_fmax_bytes


tile_size = _TileSize()


def is_on_chip(buffer: Any) -> bool:
    return buffer in (SBUF, PSUM)


def is_psum(buffer: Any) -> bool:
    return buffer is PSUM


def is_sbuf(buffer: Any) -> bool:
    return buffer is SBUF


def program_id(axis: int = 0) -> int:
    need(axis == 0, "lnc", f"program_id({axis}): the grid has one axis")
    return current().index


def num_programs(axes: Any = 0) -> int:
    need(axes in (0, None, (0,), [0]), "lnc", f"num_programs({axes}): the grid has one axis")
    return current().grid or 1


def program_ndim() -> int:
    return 1 if current().grid else 0


def affine_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """range(), by its deprecated name."""
    for value in (start, stop, step):
        if isinstance(value, VirtualRegister):
            value.__index__()
    return range(start) if stop is None else range(start, stop, step)


sequential_range = static_range = affine_range


def _bound(value: Any, what: str) -> int | None:
    if isinstance(value, VirtualRegister):
        return value.read(what)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{what} {value!r}: an int or a register")
    return int(value)


def _signature(first: int, inner: list[tuple[int, int]]) -> list[tuple]:
    """What an iteration issued itself. Inner dynamic loops may run any number of times."""
    records, skipped = current().trace, {i for start, end in inner for i in range(start, end)}
    own = [records[i] for i in range(first, len(records)) if i not in skipped]
    return [(r.op, r.engine, r.partitions, r.elements, r.dtypes, r.buffers) for r in own]


def _iterate(loop: Loop, body: Callable[[], Any]) -> Any:
    """One iteration. The hardware repeats one copy of the body, so Python must not make it different each time."""
    core = current()
    core.loop_count += 1
    loop.iterations += 1
    core.loops.append(core.loop_count)
    core.loop_spans.append([])
    first = len(core.trace)
    try:
        result = body()
    finally:
        core.loops.pop()
        inner = core.loop_spans.pop()
    if core.loop_spans:
        core.loop_spans[-1].append((first, len(core.trace)))
    signature = _signature(first, inner)
    if loop.signature is None:
        loop.signature = signature
    elif signature != loop.signature:
        refuse(
            "loop",
            "the body of a dynamic loop issued different instructions in another iteration; it is traced once,"
            " so it must not depend on Python state that changes",
        )
    return result


def _open(what: str) -> Loop:
    core = current()
    need(not core.no_reorder, "loop", f"{what} inside nl.no_reorder()")
    return Loop(call_site())


def _close(loop: Loop) -> None:
    current().trips.append((loop.site, loop.iterations))


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[VirtualRegister], None], step: int = 1) -> None:
    """A counted loop on the device; the body gets the index as a read-only register.

    Without data, a bound in a register is unknown: the body then runs once.
    """
    legal = isinstance(step, (int, np.integer)) and not isinstance(step, bool) and step > 0
    need(legal, "loop", f"fori_loop: step {step!r} must be a positive int known while tracing")
    first, end = _bound(lower, "lower bound"), _bound(upper, "upper bound")
    loop = _open("fori_loop")
    unknown = first is None or end is None
    for i in [None] if unknown else range(first, end, step):  # type: ignore[arg-type, list-item]
        result = _iterate(loop, lambda i=i: body_fun(VirtualRegister(i, frozen=True)))  # type: ignore[misc]
        need(result is None, "loop", f"the body of fori_loop returned {result!r}; it returns nothing")
    _close(loop)


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """A loop on the device until the register that the body returns is 0. Without data the body runs once."""
    if not isinstance(init, VirtualRegister):
        raise TypeError(f"while_loop: init {init!r} must be a register")
    loop, value = _open("while_loop"), init.read("init of while_loop")
    for _ in range(MOST_ITERATIONS):
        if value == 0:
            _close(loop)
            return
        holder: list[int | None] = []

        def body(value: int | None = value, holder: list = holder) -> None:
            following = body_fun(VirtualRegister(value))
            if not isinstance(following, VirtualRegister):
                raise TypeError(f"the body of while_loop returned {following!r}; it returns the next condition register")
            holder.append(following.read("the condition of while_loop"))

        _iterate(loop, body)
        value = holder[0]
        if value is None:
            _close(loop)
            return
    raise build_error("loop", f"while_loop ran {MOST_ITERATIONS} times")


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Any:
    """The loop of the parser front end; the tracer refuses it."""
    core = current()
    if core.frontend != "parser":
        refuse("removed", "nl.dynamic_range belongs to the parser front end; use nl.fori_loop")
    loop = _open("dynamic_range")
    first, end = (0, start) if stop is None else (start, stop)
    return _dynamic_iterations(loop, _bound(first, "start"), _bound(end, "stop"), step)


def _dynamic_iterations(loop: Loop, first: int | None, end: int | None, step: int) -> Any:
    core = current()
    unknown = first is None or end is None
    for i in [None] if unknown else range(first, end, step):  # type: ignore[arg-type, list-item]
        core.loop_count += 1
        loop.iterations += 1
        core.loops.append(core.loop_count)
        try:
            yield VirtualRegister(i, frozen=True)
        finally:
            core.loops.pop()
    _close(loop)


class no_reorder:
    """Program order is kept inside; the emulator always keeps it."""

    def __enter__(self) -> no_reorder:
        current().no_reorder += 1
        return self

    def __exit__(self, *_: Any) -> None:
        current().no_reorder -= 1


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Print the values of a tensor at once."""
    need(tensor.buffer is SBUF or is_hbm(tensor.buffer), "memory", f"device_print of {tensor}; it must be in SBUF or HBM")
    print(print_prefix, access.array(tensor) if current().data else tensor)
