"""What an operator's cases.py says: the shapes of real models, and what the edge generator may vary. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Dim:
    """A letter of the declared shapes. Every size from 0 up is tried that these restrictions leave.

    multiple: the size is a multiple of this number, or of another letter's size (its name).
    at_most: another letter's name. minimum: the smallest size that means anything.
    optional: every tensor may lack this dimension (a batch).
    at_least: where the size is not at an edge it is at least this, so that the other letters' edges mean something.
    """

    multiple: int | str = 1
    at_most: str = ""
    minimum: int = 0
    optional: bool = False
    at_least: int = 0


@dataclass(frozen=True)
class Case:
    """A named shape of a real model: sizes of the letters, and scalar arguments that differ from the usual."""

    name: str
    sizes: Mapping[str, int]
    scalars: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cases:
    """`CASES` of an operator's cases.py.

    dims: every letter, those of `Op.sized` too. models: shapes of real models, the first is the primary one.
    scalars: the values of each scalar argument that the generator draws from, the first is the usual one; of a torch.dtype its
    name. Arguments of `Op.sized` are left out.
    valid(sizes, scalars): whether the operator takes these sizes together with these scalar arguments (with those of `Op.sized`).
    """

    dims: Mapping[str, Dim]
    models: tuple[Case, ...]
    scalars: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    valid: Callable[[dict[str, int], dict[str, Any]], bool] | None = None

    def __post_init__(self) -> None:
        for case in self.models:
            if set(case.sizes) != set(self.dims):
                raise ValueError(f"case {case.name!r} has sizes for {sorted(case.sizes)}, the letters are {sorted(self.dims)}")
