"""What an operator's cases.py says: the shapes of real models, and what the edge generator may vary. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Dim:
    """A letter of the declared shapes. Every size from 0 up is tried that these restrictions leave.

    multiple: the size is a multiple of this number, or of another letter's size (its name).
    at_most: another letter's name. minimum: the smallest size that means anything.
    optional: every tensor may lack this dimension (a batch).
    """

    multiple: int | str = 1
    at_most: str = ""
    minimum: int = 0
    optional: bool = False


@dataclass(frozen=True)
class Case:
    """A named shape of a real model: sizes of the letters, and scalar arguments that differ from the usual."""

    name: str
    sizes: Mapping[str, int]
    scalars: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cases:
    """`CASES` of an operator's cases.py.

    dims: every letter. models: shapes of real models, the first is the primary one. scalars: the values of each scalar
    argument that the generator draws from, the first is the usual one; `special` values of them that only the edges try.
    """

    dims: Mapping[str, Dim]
    models: tuple[Case, ...]
    scalars: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for case in self.models:
            if set(case.sizes) != set(self.dims):
                raise ValueError(f"case {case.name!r} has sizes for {sorted(case.sizes)}, the letters are {sorted(self.dims)}")
