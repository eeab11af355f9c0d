"""Finds memory faults that a GPU would hide: accesses outside an argument, races between programs, colliding lanes,
wrapped offsets.

Programs are interpreted one after the other, so a race cannot show in the result. It is found from who touched what:
every element of the memory behind the arguments remembers its last writer, its readers and its atomic users, in
arrays that a block access reads and updates at once.

Programs that hand data over are recognised by an atomic operation with release and acquire semantics on the same
scalar (a lock or a counter): what the earlier program did before is ordered before what the later one does after it.
"""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from kdk.errors import SimulationError

from .formats import Array, numpy_dtype

_MANY_ENTRIES = 1 << 24
_PATIENCE = 20_000


class KernelMemoryError(SimulationError):
    """A memory fault of a Triton kernel: the argument's name, the element's offset from its start, the argument's
    extent, the program."""

    argument: str = ""
    offset: int | None = None
    extent: str = ""
    program: tuple[int, ...] = ()


class Argument:
    """The elements that a kernel may touch through one tensor argument."""

    def __init__(self, name: str, tensor: Any, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize
        self.base = tensor.data_ptr()
        pairs = [(stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1 and stride > 0]
        self.dims = sorted(pairs, reverse=True)  # outermost first
        last = sum(stride * (size - 1) for stride, size in self.dims)
        self.nbytes = (last + 1) * itemsize if tensor.numel() else 0
        self.shape, self.strides = tuple(tensor.shape), tuple(tensor.stride())
        self.has_gaps = self.nbytes > itemsize * math.prod(size for _, size in self.dims) and self._nested()
        self.region: Region

    def _nested(self) -> bool:
        """Whether each dimension steps over all that lies inside it, so that an offset has one place in the view."""
        inside = 1
        for stride, size in reversed(self.dims):
            if stride < inside:
                return False
            inside = stride * (size - 1) + inside
        return True

    def inside(self, offsets: Array, size: int) -> Array:
        """Which byte offsets may be accessed, `size` bytes each."""
        good = (offsets >= 0) & (offsets + size <= self.nbytes)
        if self.has_gaps and size == self.itemsize:
            rest = offsets // self.itemsize
            for stride, count in self.dims:
                place = rest // stride
                good &= place < count
                rest = rest - place * stride
            good &= rest == 0
        return good

    def extent(self) -> str:
        elements = self.nbytes // self.itemsize
        return f"{elements} elements, shape {self.shape}, strides {self.strides}"


class Region:
    """A stretch of memory that one argument or several overlapping ones reach, with who touched each granule of it.

    A program is its number plus one, 0 is nobody, and a negative number is that program and others. `writer` holds
    the last one only.
    """

    def __init__(self, arguments: list[Argument]) -> None:
        self.start = min(a.base for a in arguments)
        self.stop = max(a.base + a.nbytes for a in arguments)
        granule = math.gcd(*(a.itemsize for a in arguments), *(a.base - self.start for a in arguments))
        self.shift = granule.bit_length() - 1  # the sizes of elements are powers of two
        for argument in arguments:
            argument.region = self
        self.entries = -(-(self.stop - self.start) >> self.shift)
        self.written = self.atomics = False

    @functools.cached_property
    def writer(self) -> Array:
        return _zeros(self.entries)

    @functools.cached_property
    def reader(self) -> Array:
        return _zeros(self.entries)

    @functools.cached_property
    def atomic(self) -> Array:
        return _zeros(self.entries)

    @functools.cached_property
    def lane(self) -> Array:
        return _zeros(self.entries)

    def touched(self) -> int:
        """Bytes that some program read or wrote, each address once."""
        users = [self.__dict__[name] for name in ("writer", "reader", "atomic") if name in self.__dict__]  # made at first use
        used = functools.reduce(np.logical_or, users) if users else np.zeros(1, bool)
        return int(np.count_nonzero(used)) << self.shift

    def places(self, argument: Argument, offsets: Array, size: int) -> Any:
        """Index of the granules of an access at byte offsets of an argument: a slice where they follow each other."""
        first = (offsets + (argument.base - self.start)) >> self.shift
        width = size >> self.shift
        if width > 1:
            first = (first[:, None] + np.arange(width)).ravel()
        begin, end = int(first[0]), int(first[-1])
        if end - begin == first.size - 1 and bool((np.diff(first) == 1).all()):
            return slice(begin, end + 1)
        return first

    def offset(self, argument: Argument, place: int) -> int:
        """Byte offset from the start of an argument."""
        return (place << self.shift) + self.start - argument.base


def _zeros(entries: int) -> Array:
    """Zeroed int32. A view with huge strides has huge memory behind it, of which few pages are ever touched: reserve
    no swap for it."""
    if entries < _MANY_ENTRIES:
        return np.zeros(entries, np.int32)
    noreserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    pages = mmap.mmap(-1, entries * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve)
    return np.frombuffer(pages, np.int32)


class Sanitizer:
    """The bookkeeping of one launch."""

    def __init__(self, kernel: str, grid: tuple[int, int, int]) -> None:
        self.kernel, self.grid = kernel, grid
        self.arguments: list[Argument] = []
        self.program: tuple[int, int, int] = (0, 0, 0)
        self.number = 0
        self.ordered = 0  # bit set of the programs whose work happened before this point
        self.released: dict[int, int] = {}
        self.last, self.repeats = 0, 0

    def argument(self, name: str, tensor: Any, itemsize: int) -> Argument:
        made = Argument(name, tensor, itemsize)
        self.arguments.append(made)
        return made

    def begin(self) -> None:
        """Group the arguments that overlap in memory: what one reads may be what another writes."""
        group: list[Argument] = []
        for argument in sorted((a for a in self.arguments if a.nbytes), key=lambda a: a.base):
            if group and argument.base >= max(a.base + a.nbytes for a in group):
                Region(group)
                group = []
            group.append(argument)
        if group:
            Region(group)

    def touched(self) -> int:
        """Bytes that the launch read or wrote, each address once."""
        return sum(region.touched() for region in {id(a.region): a.region for a in self.arguments if a.nbytes}.values())

    def begin_program(self, program: tuple[int, int, int]) -> None:
        self.program, self.ordered = program, 0
        self.number = int(np.ravel_multi_index(program, self.grid)) + 1

    def load(self, pointers: Any, active: Array) -> None:
        for argument, places in self._accesses(pointers, active, "load"):
            region = argument.region
            if region.written:
                self._conflict(argument, places, region.writer, "read-write", "reads what", "wrote")
            if region.atomics:
                self._conflict(argument, places, region.atomic, "atomic-plain", "reads plainly what", "updated atomically")
            self._mark(region.reader, places)

    def store(self, pointers: Any, active: Array) -> None:
        for argument, places in self._accesses(pointers, active, "store"):
            region = argument.region
            if not isinstance(places, slice):
                self._collision(argument, places)
            if region.written:
                self._conflict(argument, places, region.writer, "write-write", "writes what", "wrote")
            self._conflict(argument, places, region.reader, "read-write", "writes what", "read")
            if region.atomics:
                self._conflict(argument, places, region.atomic, "atomic-plain", "writes plainly what", "updated atomically")
            region.written = True
            region.writer[places] = self.number

    def atomic(self, pointers: Any, active: Array, sem: Any) -> None:
        for argument, places in self._accesses(pointers, active, "atomic operation"):
            region = argument.region
            if region.written:
                self._conflict(argument, places, region.writer, "atomic-plain", "updates atomically what", "wrote plainly")
            self._conflict(argument, places, region.reader, "atomic-plain", "updates atomically what", "read plainly")
            region.atomics = True
            self._mark(region.atomic, places)
        if pointers.data.size == 1 and active.all() and getattr(sem, "name", "") != "RELAXED":
            self._hand_over(int(pointers.data.item()))

    def undefined(self, pointers: Any) -> Any:
        """What a masked-off lane without `other` holds: NaN, or an integer that no kernel expects."""
        kind = pointers.get_element_ty()
        dtype = numpy_dtype(kind)
        data = np.empty(pointers.data.shape, dtype)
        if dtype.kind in "iu":
            data.view(np.uint8).fill(0x55)
        else:
            data.fill(True if dtype.kind == "b" else np.nan)
        return type(pointers)(data, kind)

    def _hand_over(self, address: int) -> None:
        self.ordered |= self.released.get(address, 0)
        self.released[address] = self.ordered | 1 << self.number

    def _accesses(self, pointers: Any, active: Array, what: str) -> Iterator[tuple[Argument, Any]]:
        """The argument and the places in its region of the active lanes, after the checks of the addresses alone."""
        addresses = pointers.data.ravel() if active.all() else pointers.data[active]
        if not addresses.size:
            return
        addresses = addresses.astype(np.int64)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        self._watch_waiting(int(addresses[0]), addresses.size)
        argument = pointers.attr.get("argument")
        if argument is None:
            yield from self._by_address(addresses, size, what)
            return
        offsets = addresses - argument.base
        wrapped = pointers.attr.get("wrapped")
        if wrapped is not None and wrapped[active].any():
            self._wrapped(argument, int(offsets[wrapped[active]][0]), what)
        if int(offsets.min()) < 0 or int(offsets.max()) + size > argument.nbytes or argument.has_gaps:
            good = argument.inside(offsets, size)
            if not good.all():
                self._outside(argument, offsets[~good], what)
        if size > 1 and bool((addresses & (size - 1)).any()):
            bad = int(offsets[addresses & (size - 1) != 0][0])
            self._fail("KDK-TRITON-MISALIGNED", argument, bad, f"{what} of {size} bytes at an address between two elements", "")
        yield argument, argument.region.places(argument, offsets, size)

    def _by_address(self, addresses: Array, size: int, what: str) -> Iterator[tuple[Argument, Any]]:
        """For pointers without a known origin (chosen by tl.where, or read from memory): the arguments that they hit."""
        for argument in self.arguments:
            offsets = addresses - argument.base
            hit = argument.inside(offsets, size)
            if hit.any():
                yield argument, argument.region.places(argument, offsets[hit], size)
                addresses = addresses[~hit]
        if addresses.size:
            raise KernelMemoryError(
                "KDK-TRITON-BOUNDS",
                f"{self.kernel}, program {self.program}: {what} at an address in no argument, {addresses.size} lanes",
                value=hex(int(addresses[0])),
                limit=f"its tensors are {', '.join(a.name for a in self.arguments) or 'none'}",
                way_out="pass every tensor that the kernel touches as an argument, also what it reaches by an address in memory",
            )

    def _watch_waiting(self, address: int, lanes: int) -> None:
        """Programs run to the end one after the other, so one that waits for a later one would wait for ever."""
        self.repeats = self.repeats + 1 if lanes == 1 and address == self.last else 0
        self.last = address
        if self.repeats > _PATIENCE:
            raise SimulationError(
                "KDK-TRITON-DEADLOCK",
                f"{self.kernel}, program {self.program}: waits for what no earlier program did",
                value=f"{_PATIENCE} accesses of one element in a row",
                limit="the simulator runs programs in the order of their ids",
            )

    def _mark(self, users: Array, places: Any) -> None:
        """Add this program to the users of the places."""
        known = users[places]
        mine = (known == 0) | (known == self.number)
        users[places] = self.number if mine.all() else np.where(mine, self.number, -np.abs(known))

    def _conflict(self, argument: Argument, places: Any, users: Array, kind: str, mine: str, theirs: str) -> None:
        known = users[places]
        other = (known != 0) & (known != self.number)
        if not other.any():
            return
        if self.ordered:
            unordered = [u for u in np.unique(known[other]).tolist() if not self.ordered >> abs(u) & 1]
            other &= np.isin(known, unordered)
            if not other.any():
                return
        lane = int(np.flatnonzero(other)[0])
        who = self._name(int(known[lane]))
        place = places.start + lane if isinstance(places, slice) else int(places[lane])
        self._fail(
            "KDK-TRITON-RACE",
            argument,
            argument.region.offset(argument, place),
            f"{kind} race: {mine} {who} {theirs}, {int(other.sum())} elements",
            "let one program own each element, use atomics, or order the programs by an atomic lock or counter",
        )

    def _name(self, user: int) -> str:
        program = tuple(int(i) for i in np.unravel_index(abs(user) - 1, self.grid))
        return f"program {program} and others" if user < 0 else f"program {program}"

    def _collision(self, argument: Argument, places: Array) -> None:
        if bool((np.diff(places) > 0).all()):
            return
        lanes = np.arange(places.size, dtype=np.int32)
        argument.region.lane[places] = lanes
        lost = argument.region.lane[places] != lanes
        if lost.any():
            lane = int(np.flatnonzero(lost)[0])
            offset = argument.region.offset(argument, int(places[lane]))
            way_out = "mask all lanes but one, or give every lane its own element"
            self._fail(
                "KDK-TRITON-COLLISION",
                argument,
                offset,
                f"several lanes of one store hit one element, {int(lost.sum())} lanes lose",
                way_out,
            )

    def _outside(self, argument: Argument, offsets: Array, what: str) -> None:
        problem = f"{what} out of bounds, {offsets.size} lanes"
        self._fail("KDK-TRITON-BOUNDS", argument, int(offsets[0]), problem, "mask the lanes that lie outside")

    def _wrapped(self, argument: Argument, offset: int, what: str) -> None:
        self._fail(
            "KDK-TRITON-OVERFLOW",
            argument,
            offset,
            f"{what} at an offset whose int32 arithmetic wrapped around",
            "compute the offset in int64: tl.program_id(0).to(tl.int64), or a stride passed as int64",
        )

    def _fail(self, code: str, argument: Argument, offset: int, problem: str, way_out: str) -> None:
        element = offset // argument.itemsize
        error = KernelMemoryError(
            code,
            f"{self.kernel}, argument {argument.name}, program {self.program}: {problem}",
            value=f"element offset {element}",
            limit=f"{argument.name} has {argument.extent()}",
            way_out=way_out,
        )
        error.argument, error.offset = argument.name, element
        error.extent, error.program = argument.extent(), self.program
        raise error
