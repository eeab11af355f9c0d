"""Launch configurations, and who wins, as data: per operator and chip, by shape bucket. Imports no torch; files are read at first use.

A kernel's file declares its launch parameters with their legal values, `TUNABLE = {"rows": (16, 32, 64)}`, and takes each as a
keyword, None standing for its own heuristic. Values come from `tuning/<target>.json` in the operator's folder, and from the same in
the user's cache (`user_file`), whose entries go before. A file is

    {"schema": "kdk.tuning/1", "op": "rms_norm", "target": "v6e", "entries": [
      {"direction": "forward", "dtype": "bfloat16", "bucket": {"N": 4096, "H": 4096},
       "launch": {"parameters": {"rows": 128}, "case": "...", "before": 4.1e-5, "after": 4.0e-5, "unit": "s", "ratio": 0.98, ...},
       "alone":  {"winner": "kernel", "ratio": 0.7, "case": "...", ...},
       "block":  {"winner": "reference", "ratio": 1.08, "block": "llama-3-8b: norm + projection", ...}}]}

with "evidence", "environment" and "date" in each of the three parts, any of which may lack. A bucket holds, for every letter of the
declared shapes, the sizes above half of its number and up to it, which is a power of two. ratio: in `launch` of the times after and
before, null where nothing has one; in `alone` of the kernel's over the reference's; in `block` of the whole block with the kernel
over the block without it, of the bucket's blocks the one in which the kernel does worst. Direction "backward" of a block is forward
and backward together.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdk.errors import DeclarationError
from kdk.op import Op

SCHEMA = "kdk.tuning/1"
KERNEL, REFERENCE = "kernel", "reference"
DIRECTIONS = ("forward", "backward")
EVIDENCE = ("compiled", "modelled", "measured")
PROVENANCE = ("evidence", "environment", "date")
PARTS = {
    "launch": ("parameters", "case", "before", "after", "unit", "ratio", *PROVENANCE),
    "alone": ("winner", "ratio", "case", *PROVENANCE),
    "block": ("winner", "ratio", "block", *PROVENANCE),
}
Key = tuple[str, str, tuple[tuple[str, int], ...]]
"""Direction, dtype, bucket."""


def bucket(sizes: Mapping[str, int]) -> dict[str, int]:
    """The bucket of sizes, by letter: each rounded up to a power of two."""
    return {letter: 1 << max(size - 1, 0).bit_length() for letter, size in sorted(sizes.items())}


def key(direction: str, dtype: str, sizes: Mapping[str, int]) -> Key:
    """What an entry is found by. sizes: of the letters, or their bucket."""
    return direction, dtype, tuple(bucket(sizes).items())


@dataclass
class Table:
    """The entries of one operator for one chip. refused: what was not taken, and why, each in a line that names the file."""

    entries: dict[Key, dict[str, Any]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def part(self, name: str, direction: str, dtype: str, sizes: Mapping[str, int]) -> dict[str, Any] | None:
        """The "launch", "alone" or "block" of the sizes' bucket."""
        found = self.entries.get(key(direction, dtype, sizes), {}).get(name)
        return dict(found) if found else None


def shipped_file(op: Op, target: str) -> Path:
    """In the operator's own folder."""
    (folder, *_) = importlib.import_module(op.package).__path__
    return Path(folder) / "tuning" / f"{target}.json"


def user_file(op: Op, target: str) -> Path:
    """In the user's cache."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("kdk")) / "tuning" / op.name / f"{target}.json"


@functools.cache
def _tables() -> dict[tuple[str, str], Table]:
    return {}


def forget() -> None:
    """Read the files anew. Calls of an operator that already ran keep the configuration that they found."""
    _tables.cache_clear()


def table(op: Op, target: str) -> Table:
    """What is recorded of an operator for a chip: the shipped file's entries, and over them, part by part, the user's."""
    kept = _tables()
    found = kept.get((op.name, target))
    if found is None:
        found = Table()
        for file in (shipped_file(op, target), user_file(op, target)) if target else ():
            own = read(file, op, target)
            found.refused += own.refused
            for where, entry in own.entries.items():
                found.entries[where] = {**found.entries.get(where, {}), **entry}
        kept[op.name, target] = found
    return found


def read(file: Path, op: Op, target: str) -> Table:
    """One file, validated: an entry that does not fit is left out, with the reason."""
    found = Table()
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        return found
    except (OSError, ValueError) as error:
        found.refused.append(f"{file}: cannot be read: {' '.join(str(error).split())}")
        return found
    wanted = {"schema": SCHEMA, "op": op.name, "target": target}
    for name, value in wanted.items():
        said = content.get(name) if isinstance(content, dict) else None
        if said != value:
            found.refused.append(f"{file}: {name} is {said!r}, not {value!r}")
            return found
    letters = op.letters
    for number, entry in enumerate(content.get("entries", ())):
        reason = _wrong(entry, letters)
        where = None if reason else key(entry["direction"], entry["dtype"], entry["bucket"])
        if where in found.entries:
            reason = "a second entry for one direction, dtype and bucket"
        if reason or where is None:
            found.refused.append(f"{file}: entry {number}: {reason}")
        else:
            found.entries[where] = entry
    return found


def _wrong(entry: Any, letters: set[str]) -> str:
    """Why an entry is not one, or ""."""
    if not isinstance(entry, dict) or not {"direction", "dtype", "bucket"} <= set(entry):
        return "it has no direction, dtype and bucket"
    if entry["direction"] not in DIRECTIONS:
        return f"direction {entry['direction']!r}: there are {', '.join(DIRECTIONS)}"
    unknown = set(entry) - {"direction", "dtype", "bucket", *PARTS}
    if unknown:
        return f"unknown parts {', '.join(sorted(unknown))}"
    sizes = entry["bucket"]
    if not isinstance(sizes, dict) or not set(sizes) <= letters or not all(isinstance(n, int) for n in sizes.values()):
        return f"bucket {sizes!r}: the letters of the operator are {', '.join(sorted(letters))}"
    if bucket(sizes) != dict(sorted(sizes.items())):
        return f"bucket {sizes!r}: sizes are powers of two"
    for name, fields in PARTS.items():
        part = entry.get(name)
        if part is None:
            continue
        if not isinstance(part, dict) or set(part) != set(fields):
            return f"{name} has {sorted(part) if isinstance(part, dict) else part!r}, not {sorted(fields)}"
        if part["evidence"] not in EVIDENCE:
            return f"{name}: evidence {part['evidence']!r}: there are {', '.join(EVIDENCE)}"
        if "winner" in part and (not isinstance(part["ratio"], int | float) or part["winner"] != winner(part["ratio"])):
            return f"{name}: winner {part['winner']!r} with the ratio {part['ratio']!r}"
        if "parameters" in part and not isinstance(part["parameters"], dict):
            return f"{name}: parameters {part['parameters']!r}"
    return ""


def winner(ratio: float) -> str:
    """By the kernel's time over the reference's."""
    return KERNEL if ratio <= 1 else REFERENCE


def write(file: Path, op: Op, target: str, changes: Mapping[Key, Mapping[str, Any]]) -> None:
    """Put parts of entries into a file, over those that it has; None takes a part out, and the last one the file.

    Raises DeclarationError where what stands in the file does not hold."""
    old = read(file, op, target)
    if old.refused:
        way_out = "correct or delete it, then tune again"
        raise DeclarationError("KDK-TUNING", "a tuning file that does not hold", value="; ".join(old.refused), way_out=way_out)
    for where, parts in changes.items():
        direction, dtype, sizes = where
        entry = {**old.entries.pop(where, {}), **parts}
        kept = {name: entry[name] for name in PARTS if entry.get(name) is not None}
        if kept:
            old.entries[where] = {"direction": direction, "dtype": dtype, "bucket": dict(sizes), **kept}
            reason = _wrong(old.entries[where], op.letters)
            assert not reason, reason
    if not old.entries:
        file.unlink(missing_ok=True)
        forget()
        return
    content = {"schema": SCHEMA, "op": op.name, "target": target, "entries": [old.entries[where] for where in sorted(old.entries)]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")
    forget()


# ---- what a call finds ---------------------------------------------------------------------------------------------------


def places(op: Op, direction: str) -> list[tuple[str, list[tuple[int, int | None, int | None]]]]:
    """Where each letter's size stands among a direction's arguments: (argument, first dimension, end), (argument, None, None) where
    it is the argument itself. A starred letter is the product of its dimensions."""
    names = list(inspect.signature(_function(op, direction)).parameters)
    grads = dict(zip(names, op.outputs)) if direction == "backward" else {}
    found: dict[str, list[tuple[int, int | None, int | None]]] = {}
    for letter, scalar in op.sized.items():
        if scalar in names:
            found.setdefault(letter, []).append((names.index(scalar), None, None))
    for place, name in enumerate(names):
        tokens = op.shapes.get(grads.get(name, name), "").split()
        star = next((i for i, token in enumerate(tokens) if token.startswith("*")), None)
        for i, token in enumerate(tokens):
            if "|" in token:  # B or 1: another tensor says B
                continue
            low, high = (i - len(tokens), i + 1 - len(tokens)) if star is None or i > star else (i, i + 1)
            if i == star:
                low, high = i, i + 1 - len(tokens)
            found.setdefault(token.strip("*"), []).append((place, low, high))
    return list(found.items())


def _function(op: Op, direction: str) -> Callable[..., Any]:
    function = op.function(direction)
    assert function is not None
    return function


def sizes_of(where: Sequence[tuple[str, list[tuple[int, int | None, int | None]]]], args: Sequence[Any]) -> dict[str, int]:
    """The letters' sizes, from `places` and a call's arguments; a letter of left-out tensors alone is left out."""
    found: dict[str, int] = {}
    for letter, spots in where:
        for place, low, high in spots:
            value = args[place] if place < len(args) else None
            if value is None:
                continue
            if low is None:
                found[letter] = value
            else:
                size = 1
                for n in value.shape[low : high or None]:
                    size *= n
                found[letter] = size
            break
    return found


def launch_parameters(
    op: Op, direction: str, target: str, kernel: Any, refused: Callable[[str], Any]
) -> Callable[[Sequence[Any]], Mapping[str, Any]]:
    """From a direction's arguments to the recorded launch parameters, empty where there are none; to the least inside `smallest`.

    kernel: of kdk.dispatch. refused: told why a record is not taken; the kernel then chooses by itself."""
    recorded = table(op, target)
    for reason in recorded.refused:
        refused(reason)
    tuned = any("launch" in entry for (of, _, _), entry in recorded.entries.items() if of == direction)
    if not tuned and not kernel.tunable:
        return lambda args: {}
    where = places(op, direction) if tuned else []

    def found(args: Sequence[Any]) -> Mapping[str, Any]:
        if _SMALLEST.get():
            return _least(target, kernel, kernel.arguments(*args))
        if not tuned:
            return {}
        working = next((str(a.dtype).removeprefix("torch.") for a in args if hasattr(a, "dtype") and a.is_floating_point()), "")
        part = recorded.part("launch", direction, working, sizes_of(where, args))
        if part is None:
            return {}
        reason = kernel.refuses(target, part["parameters"], kernel.arguments(*args))
        if reason:
            refused(f"{part['parameters']} of {part['date']}: {reason}")
            return {}
        return part["parameters"]  # type: ignore[no-any-return]

    return found


_SMALLEST: contextvars.ContextVar[bool] = contextvars.ContextVar("smallest", default=False)


@contextlib.contextmanager
def smallest() -> Iterator[None]:
    """Inside, kernels run with the first of the legal values of each launch parameter, by custom the smallest: a small problem then
    takes a kernel through the steps that only a large one does otherwise."""
    token = _SMALLEST.set(True)
    try:
        yield
    finally:
        _SMALLEST.reset(token)


def _least(target: str, kernel: Any, args: tuple[Any, ...]) -> Mapping[str, Any]:
    """The first launch parameters, in the order of their legal values, that the kernel takes; none where it takes no such ones."""
    names = list(kernel.tunable)
    every = (dict(zip(names, values)) for values in itertools.product(*kernel.tunable.values()))
    return next((parameters for parameters in every if not kernel.refuses(target, parameters, args)), {})


def illegal(parameters: Mapping[str, Any], tunable: Mapping[str, tuple[Any, ...]], kernel: str) -> str:
    """Why a kernel does not take launch parameters, or "": it has no such one (any more), or the value is none of its legal ones."""
    for name, value in parameters.items():
        if name not in tunable:
            return f"{kernel} has no launch parameter {name!r}; it has {', '.join(tunable) or 'none'}"
        if value not in tunable[name]:
            return f"{kernel}: {name} = {value!r}; legal are {', '.join(map(str, tunable[name]))}"
    return ""


@functools.cache
def bound(function: Callable[..., Any], parameters: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """A kernel's function with its launch parameters bound and out of its signature. One object for each: launchers keep what they
    compiled by function, and TorchTPU and TorchNeuron register it under its name."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **dict(parameters), **kwargs)

    signature = inspect.signature(function, eval_str=True)
    kept = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY or p.name == "interpret"]
    call.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in kept} | {"return": signature.return_annotation}
    call.__name__ = "_".join([function.__name__, *(f"{name}_{value}" for name, value in parameters)])
    return call
