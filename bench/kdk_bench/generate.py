"""Cases for an operator, from its declaration: sizes at the edges, awkward layouts, awkward values.

A `Problem` says what the arguments are; `drawing` makes them. Nothing here knows an operator: letters, layouts and values only.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kdk.cases import Case, Cases, Dim
from kdk.errors import DeclarationError
from kdk.op import Op
from kdk_bench.declared_cases import cases_of

SIZES = (1, 2, 3, 5, 7, 8, 13, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1009, 1023, 1024, 1025)
LONG = (4099, 2053, 1031, 521, 257, 131, 67)
ONE_MORE = (4097, 2049, 1025, 513, 257, 129, 65)  # than whole tiles
ALMOST = (4093, 2039, 1021, 509, 251, 127, 61)  # primes: of tiles of any width the last one is nearly full
WHOLE_TILES = (4096, 2048, 1024, 512, 256, 128, 64)
LONGEST = (16411, *LONG)  # past what a kernel holds at once: where it walks over a row in tiles
QUICK_ELEMENTS, FULL_ELEMENTS = 40_000, 200_000  # of the largest tensor
MANY_ELEMENTS = 300_000  # of the one case that is large: more than one block of a kernel that takes megabytes at a time


@dataclass(frozen=True)
class Problem:
    """One case. sizes: of every letter. lead: how a starred letter is spread over dimensions. counted: it may be informative."""

    name: str
    sizes: Mapping[str, int]
    lead: Mapping[str, tuple[int, ...]]
    scalars: Mapping[str, Any]
    mixed: tuple[str, ...] = ()
    layout: str = "contiguous"
    values: str = "normal"
    needs: tuple[str, ...] = ()
    counted: bool = True
    absent: tuple[str, ...] = ()
    """Outputs that no gradient comes back from."""
    ones: tuple[str, ...] = ()
    """Tensors whose "B|1" dimensions are 1."""
    left_out: tuple[str, ...] = ()
    """Optional letters, of size 1, whose dimension no tensor has."""
    without: tuple[str, ...] = ()
    """Optional tensors that are None."""
    pattern: str = "random"
    """The values of index tensors: one of PATTERNS, or "sentinel"."""
    index_dtype: str = "int64"
    launch: str = "usual"  # the launch parameters, or "smallest"

    @property
    def elements(self) -> int:
        """A measure of size, by which the smallest failing case is found."""
        return math.prod(self.sizes.values()) or 0

    def __str__(self) -> str:
        sizes = " ".join(f"{letter}={size}" for letter, size in self.sizes.items())
        extra = [f"{k}={v}" for k, v in self.scalars.items()] + [f"{t} {self.layout}" for t in ("inputs",)]
        extra += [f"without {name}" for name in self.without]
        extra += [] if self.launch == "usual" else [f"{self.launch} launch parameters"]
        return f"{self.name}: {sizes}, {', '.join(extra)}, {self.values} values"


def shape(op: Op, name: str, problem: Problem) -> tuple[int, ...]:
    """The shape of a tensor argument, output or saved tensor."""
    result: list[int] = []
    for token in op.shapes[name].split():
        if token.startswith("*"):
            result += problem.lead[token[1:]]
        elif token.removesuffix("|1") in problem.left_out:
            continue
        elif token.endswith("|1"):
            result.append(1 if name in problem.ones else problem.sizes[token[:-2]])
        else:
            result.append(int(token) if token.isdigit() else problem.sizes[token])
    return tuple(result)


def longest(op: Op, name: str, problem: Problem) -> int:
    """The longest sum behind one element of an output, saved tensor or gradient ("grad x")."""
    parts = [token.partition("/") for token in op.longest.get(name, "").split()]
    return max(1, math.prod(problem.sizes[whole] // (problem.sizes[by] if by else 1) for whole, _, by in parts))


# ---- sizes ------------------------------------------------------------------------------------------------------------


def fit(sizes: dict[str, int], dims: Mapping[str, Dim]) -> dict[str, int]:
    """The nearest sizes that keep the declared restrictions."""
    fitted = dict(sizes)
    for _ in range(2):  # a limit may name a letter that comes later
        for letter, dim in dims.items():
            size = max(fitted[letter], dim.minimum)
            if dim.at_most:
                size = min(size, fitted[dim.at_most])
            multiple = fitted[dim.multiple] if isinstance(dim.multiple, str) else dim.multiple
            if multiple > 1 and size:
                size = max(multiple, size // multiple * multiple)
            fitted[letter] = size
    return fitted


def _largest(op: Op, sizes: Mapping[str, int]) -> int:
    """Elements of the largest tensor."""
    return max(
        math.prod(int(t) if t.isdigit() else sizes[t.strip("*").removesuffix("|1")] for t in text.split()) for text in op.shapes.values()
    )


def _shrink(op: Op, sizes: dict[str, int], dims: Mapping[str, Dim], limit: int, keep: tuple[str, ...]) -> dict[str, int]:
    """Halve the largest size that need not be kept until the tensors are small enough."""
    sizes = fit(sizes, dims)
    while _largest(op, sizes) > limit:
        free = [letter for letter in sizes if letter not in keep and sizes[letter] > max(1, dims[letter].at_least)] or list(sizes)
        biggest = max(free, key=lambda letter: sizes[letter])
        before = dict(sizes)
        sizes = fit({**sizes, biggest: max(1, sizes[biggest] // 2)}, dims)
        if sizes == before:  # restrictions hold it up: cut the letter they name
            keep = ()
            sizes = fit({letter: max(1, size // 2) for letter, size in sizes.items()}, dims)
            if sizes == before:
                break
    return sizes


def _lead(op: Op, sizes: Mapping[str, int], rng: random.Random, fewest: bool = False, rank: int = 0) -> dict[str, tuple[int, ...]]:
    """Spread every starred letter over no, one or two dimensions, three where it does not come first.

    fewest: over none, where its size is 1. rank: so that its tensor has 4 or 5 dimensions, if it can.
    """
    result: dict[str, tuple[int, ...]] = {}
    for text in op.shapes.values():
        tokens = text.split()
        for at, token in enumerate(tokens):
            if token.startswith("*"):
                splits = _splits(sizes[token[1:]], at > 0, fewest)
                fitting = [split for split in splits if len(tokens) - 1 + len(split) in (4, 5)] if rank else []
                result[token[1:]] = rng.choice(fitting or splits)
    return result


def _splits(n: int, inner: bool, fewest: bool) -> list[tuple[int, ...]]:
    splits: list[tuple[int, ...]] = [(n,)] + [(d, n // d) for d in (2, 3, 5, 7) if n and n % d == 0]
    if n == 1:
        splits = [()] if fewest else [*splits, ()]
    if inner and n and not fewest:
        splits += [(n, 1)] + [(d, e, n // d // e) for d in (2, 3, 5, 7) for e in (1, 2, 3, 5) if n % (d * e) == 0]
    return splits


# ---- problems ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """One kind of case. edge: sizes the focus letter takes. reduced: the focus is a summed letter, the first or the last.
    place: the focus is the letter declared there; every optional tensor is given and every gradient needed.
    many: the outermost letter takes what MANY_ELEMENTS leave. bare: starred letters are of size 1 and have no dimension."""

    name: str
    edge: tuple[int, ...] = ()
    layout: str = "contiguous"
    values: str = "normal"
    mixed: bool = False
    counted: bool = True
    reduced: int | None = None
    place: int | None = None
    many: bool = False
    pattern: str = ""
    bare: bool = False
    launch: str = "usual"


QUICK = (
    Slot("plain"),
    Slot("one more than a tile, expanded", (129,), "expanded"),
    Slot("one less than a tile, far columns", (127, 255, 1023), "far columns"),
    Slot("chunk of a wider tensor", (129, 65, 257), "chunk", mixed=True),
    Slot("prime, far rows", (131, 67, 1009), "far rows", mixed=True),
    Slot("tiny values", (1009,), "padded", "tiny"),
    Slot("long rows of different scale", WHOLE_TILES, "offset", "scales", mixed=True, reduced=0),
    Slot("long reduction, huge values", LONG, "contiguous", "huge", reduced=-1),
    Slot("infinities and NaN", (33, 65, 130), "strided", "special"),
    Slot("longest reduction, several blocks", LONGEST, "strided", "scales", reduced=0, many=True),
    Slot("one element", (1,), counted=False),
    Slot("empty", (0,), counted=False),
)

SENTINELS = Slot("every index a sentinel", (65,), counted=False, pattern="sentinel")
CHANNELS_LAST = (
    Slot("channels last", (33, 65, 130), "channels_last"),
    Slot("channels last, long rows of different scale", LONG, "channels_last", "scales", reduced=0, launch="smallest"),
)
BARE = Slot("strided, no leading dimension", (129, 65), "strided", counted=False, bare=True)
TILES = (
    Slot("whole tiles, then nothing", (256, 128), place=0),
    Slot("one more than wide tiles, a chunk", (8193, 4097, 2049, 1025, 513, 257), "chunk", place=-1),
    Slot("long reduction in the smallest steps", ONE_MORE, values="scales", reduced=0, launch="smallest"),
    Slot("nearly whole, in the smallest steps", ALMOST, values="scales", reduced=-1, launch="smallest"),
)
PATTERNS = ("random", "equal", "sorted", "duplicates")
"""Of indices: drawn; all the same (a hot row); in order; a few values many times."""


def slots(op: Op) -> tuple[Slot, ...]:
    """The kinds of cases of an operator in the quick tier."""
    particular = [*([SENTINELS] if op.sentinels else []), *(CHANNELS_LAST if op.layouts else ()), *([BARE] if _starred(op) else [])]
    return (*QUICK, *particular, *TILES)


def _starred(op: Op) -> set[str]:
    return {token[1:] for text in op.shapes.values() for token in text.split() if token.startswith("*")}


def _rng(*words: object) -> random.Random:
    return random.Random(hashlib.sha256(repr(words).encode()).digest())


def _medium(op: Op, dims: Mapping[str, Dim], limit: int, rng: random.Random) -> dict[str, int]:
    """Every letter a few tiles' worth, the outermost and innermost the most."""
    letters = list(dims)
    sizes = {letter: rng.choice((2, 3, 5)) for letter in letters}
    sizes[letters[0]] = rng.choice((130, 150, 137))
    sizes[letters[-1]] = rng.choice((192, 260, 200))
    return _shrink(op, _parts(_usual(sizes, dims, ""), dims, letters[-1], rng), dims, limit, ())


def _usual(sizes: dict[str, int], dims: Mapping[str, Dim], focus: str) -> dict[str, int]:
    """At least what the cases ask for away from an edge."""
    return {letter: size if letter == focus else max(size, dims[letter].at_least) for letter, size in sizes.items()}


def _parts(sizes: dict[str, int], dims: Mapping[str, Dim], focus: str, rng: random.Random) -> dict[str, int]:
    """Letters that are a part of another: all of it, a half or three quarters, of enough to tell these apart."""
    sizes = dict(sizes)
    for letter, dim in dims.items():
        if dim.at_most and letter == focus:
            sizes[dim.at_most] = max(sizes[letter], sizes[dim.at_most])
        elif dim.at_most:
            if dim.at_most != focus:
                sizes[dim.at_most] = max(sizes[dim.at_most], rng.choice((8, 12, 16)))
            whole = sizes[dim.at_most]
            sizes[letter] = rng.choice((whole, whole // 2, whole - whole // 4))
    return sizes


def _sizes(op: Op, cases: Cases, slot: Slot, focus: str, edge: int, limit: int, rng: random.Random, attempt: int) -> dict[str, int]:
    dims = cases.dims
    if slot.name == "plain":
        return _medium(op, dims, limit, rng)
    if slot.name == "one element":
        return fit({letter: rng.choice((1, 2)) if attempt > 10 else 1 for letter in dims}, dims)  # or the fewest that are valid
    sizes = {letter: 2 if slot.many else rng.choice((2, 3, 5, 8)) for letter in dims}
    if slot.name == "empty":
        sizes[focus] = 0
        return fit(sizes, dims)
    sizes[focus] = edge
    sizes = _parts(_usual(sizes, dims, focus), dims, focus, rng)
    for letter in dims:  # leave no output tiny: a few hundred elements make the statistics mean something
        if letter != focus and _largest(op, fit(sizes, dims)) < 2000:
            sizes[letter] = rng.choice((17, 33))
    if slot.many:
        outermost = next(letter for letter in (*dims, focus) if letter != focus or len(dims) == 1)
        sizes[outermost] = max(1, limit // _largest(op, fit({**sizes, outermost: 1}, dims)))
    return _shrink(op, sizes, dims, limit, (focus,))


def _focus(op: Op, cases: Cases, slot: Slot, direction: str, turn: int) -> str:
    """Whose size is at the edge: the letters take turns; in a long reduction it is one that the direction sums over."""
    letters = list(cases.dims)
    if slot.bare:
        letters = [letter for letter in letters if letter not in _starred(op)] or letters
    if slot.name == "empty":
        letters = [letter for letter in letters if cases.dims[letter].minimum == 0] or letters
    if slot.place is not None:
        return letters[slot.place]
    if slot.reduced is not None:
        names = [name for name in op.longest if name.startswith("grad ") == (direction == "backward")]
        reduced = list(dict.fromkeys(letter for name in names for letter in op.summed(name)))
        return reduced[slot.reduced] if reduced else letters[-1 - slot.reduced]
    return letters[turn % len(letters)]


def _needs(op: Op, slot: Slot, focus: str, turn: int) -> tuple[str, ...]:
    """The gradients to compute: all, one, or all but one in turn; in a long reduction those that sum over its letter."""
    names = tuple(op.uses)
    if slot.reduced == 0 or slot.place is not None:
        return names
    if slot.reduced is not None:
        return tuple(n for n in names if focus in op.summed(f"grad {n}")) or names
    left = [tuple(n for n in names if n != other) for other in names if len(names) > 1]
    alone = [(n,) for n in names if (n,) not in left]
    subsets = [names, *left, *alone]
    return subsets[turn % len(subsets)]


def _smaller(sizes: dict[str, int], focus: str, rng: random.Random) -> dict[str, int]:
    """Some of the letters that are at no edge halved a few times: the restrictions that `valid` makes are mostly limits."""
    kept = {letter: letter == focus or size < 2 or rng.random() < 0.5 for letter, size in sizes.items()}
    return {letter: size if kept[letter] else size >> rng.randint(1, size.bit_length() - 1) for letter, size in sizes.items()}


ATTEMPTS = 200  # at sizes and scalars that are valid together


def _problem(op: Op, cases: Cases, slot: Slot, direction: str, turn: int, limit: int, seed: int) -> Problem:
    """One case of a kind. What `Cases.valid` refuses is drawn again, in the end with another letter at the edge."""
    for attempt in range(ATTEMPTS):
        problem = _drawn(op, cases, slot, direction, turn, limit, seed, attempt)
        if cases.valid is None or cases.valid(dict(problem.sizes), dict(problem.scalars)):
            return problem
    problem_, way_out = f"cases.py of {op.name}: no valid sizes and scalars in {ATTEMPTS} attempts", "a wider `valid`, or narrower `dims`"
    raise DeclarationError("KDK-CASES", problem_, value=f"the kind {slot.name!r}", limit="`valid` takes some of each", way_out=way_out)


def _drawn(op: Op, cases: Cases, slot: Slot, direction: str, turn: int, limit: int, seed: int, attempt: int) -> Problem:
    rng = _rng(op.name, slot.name, turn, seed, *([attempt] if attempt else []))
    limit = max(limit, MANY_ELEMENTS) if slot.many else limit
    focus = _focus(op, cases, slot, direction, turn + (attempt if attempt >= ATTEMPTS // 2 else 0))
    least = _usual(dict.fromkeys(cases.dims, 2), cases.dims, focus)
    fitting = [e for e in slot.edge if _largest(op, fit({**least, focus: e}, cases.dims)) <= limit]
    edge = fitting[0] if (slot.reduced, slot.place) != (None, None) and fitting and not attempt else rng.choice(fitting or [1])
    sizes = _sizes(op, cases, slot, focus, edge, limit, rng, attempt)
    if attempt and (slot.counted or slot.bare):
        sizes = fit(_smaller(sizes, "" if slot.name == "plain" else focus, rng), cases.dims)
    scalars = {name: options[(turn + seed) % len(options)] for name, options in cases.scalars.items()}
    if attempt:
        scalars = {name: rng.choice(options) for name, options in cases.scalars.items()}
    left_out = tuple(letter for letter, dim in cases.dims.items() if dim.optional and letter != focus and rng.random() < 0.3)
    sizes |= dict.fromkeys((*left_out, *(_starred(op) if slot.bare else ())), 1)
    scalars |= {scalar: sizes[letter] for letter, scalar in op.sized.items()}
    one_wide = tuple(name for name in op.tensors if "|1" in op.shapes[name])
    without = () if slot.place is not None else _without(op, turn, seed)
    return Problem(
        name=slot.name if turn < len(slots(op)) else f"{slot.name} #{turn}",
        sizes=sizes,
        lead=_lead(op, sizes, rng, slot.bare or slot.name == "one element", 4 if slot.layout == "channels_last" else 0),
        scalars=scalars,
        mixed=tuple(op.mixed) if slot.mixed else (),
        layout=slot.layout,
        values=slot.values,
        needs=tuple(n for n in _needs(op, slot, focus, turn) if n not in without) or tuple(n for n in op.uses if n not in without),
        counted=slot.counted and math.prod(sizes.values()) > 1,
        absent={"padded": op.outputs[1:], "chunk": op.outputs[:-1]}.get(slot.layout, ()),
        ones=one_wide if rng.random() < 0.5 else (),
        left_out=left_out,
        without=without,
        pattern=slot.pattern or PATTERNS[turn % len(PATTERNS)],
        index_dtype=("int64", "int32")[turn // len(PATTERNS) % 2],
        launch=slot.launch,
    )


def _without(op: Op, turn: int, seed: int) -> tuple[str, ...]:
    """Optional tensors that are left out: none at first, then all, then some."""
    rng = _rng(op.name, "optional tensors", turn, seed)
    return tuple(name for name in op.optional if turn == 1 or (turn > 1 and rng.random() < 0.4))


def problems(op: Op, direction: str, *, full: bool = False, seed: int = 0) -> list[Problem]:
    """Quick: one case of each kind, a letter at the edge in turn. Full: each kind for every letter, and the models' shapes, cut."""
    cases = cases_of(op)
    kinds = slots(op)
    quick = [_problem(op, cases, slot, direction, turn, QUICK_ELEMENTS, seed) for turn, slot in enumerate(kinds)]
    if not full:
        return quick
    turns = [(slot, i + (len(kinds) + 1) * r) for r in range(1, 1 + 2 * len(cases.dims)) for i, slot in enumerate(kinds)]
    more = [_problem(op, cases, slot, direction, turn, FULL_ELEMENTS, seed) for slot, turn in turns]
    named = [_model(op, cases, case, seed) for case in cases.models]
    return [*quick, *_distinct(more), *named]


def _distinct(found: list[Problem]) -> list[Problem]:
    return list({p.name: p for p in found}.values())


def _model(op: Op, cases: Cases, case: Case, seed: int) -> Problem:
    """A real model's widths; the first letter (tokens) is cut until it is small enough to simulate."""
    rng = _rng(op.name, case.name, seed)
    tokens = next(iter(cases.dims))
    keep = tuple(letter for letter in cases.dims if letter != tokens)
    sizes = _shrink(op, dict(case.sizes), cases.dims, FULL_ELEMENTS, keep)
    return model_problem(op, cases, case, sizes, _lead(op, sizes, rng))


def model_problem(op: Op, cases: Cases, case: Case, sizes: Mapping[str, int], lead: Mapping[str, tuple[int, ...]]) -> Problem:
    """A model's case at sizes that may be cut: its scalar arguments, every gradient needed."""
    usual = {name: options[0] for name, options in cases.scalars.items()} | dict(case.scalars)
    scalars = usual | {scalar: sizes[letter] for letter, scalar in op.sized.items()}
    if cases.valid is not None and not cases.valid(dict(sizes), dict(scalars)):
        problem, way_out = f"cases.py of {op.name}: the model {case.name!r} is not valid", "correct the case, or `valid`"
        raise DeclarationError("KDK-CASES", problem, value=f"{sizes} {scalars}", way_out=way_out)
    return Problem(name=case.name, sizes=sizes, lead=lead, scalars=scalars, needs=tuple(op.uses))
