"""The declaration of an operator: the one place that says what it is. Imports no torch."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kdk.errors import DeclarationError


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operator, declared in its folder's `__init__.py` as `op`. Its name is the reference's.

    Shapes are written in letters, one string per tensor: "*N H" is any number of leading dimensions with N elements in all,
    then H columns. The same letter is the same size everywhere; "B|1" is B or 1.
    """

    reference: Callable[..., Any]
    """Plain torch; its typed signature is the schema, its docstring the documentation. Returns outputs, then saved tensors."""
    check: Callable[..., None]
    """Raises InputError for arguments that the operator does not take; called before anything runs, and under compile."""
    outputs: tuple[str, ...]
    """Names of the outputs, in the order the reference returns them."""
    shapes: Mapping[str, str]
    """Every tensor argument, output and saved tensor, in letters."""
    kind: Literal["elementwise", "row", "algorithmic"]
    """Without evidence, element-wise and row operators decompose under torch.compile (the compiler fuses them into their
    neighbours), algorithmic ones keep their kernel."""
    backward: Callable[..., Any] | None = None
    """One gradient per entry of `uses`, None where `needs` does not name it."""
    saved: tuple[str, ...] = ()
    """Names of the reference's trailing results, kept for backward; the same for every implementation."""
    uses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Differentiable input -> the inputs, outputs and saved tensors that its gradient reads."""
    longest: Mapping[str, str] = field(default_factory=dict)
    """Output, saved tensor, or gradient ("grad x") -> letters whose product is the longest sum behind one element."""
    independent: tuple[str, ...] = ()
    """Letters along which the operator falls into independent parts: on a part of every tensor that has the letter, and all of
    the others, it gives that part of the results that have it. Rows of a norm, not its columns. DTensor shards along these."""
    flops: Mapping[str, Callable[..., int]] = field(default_factory=dict)
    """"forward" and "backward" -> floating-point operations, from the letters' sizes by keyword."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """Working dtypes, beside float64, which the reference alone takes."""
    mixed: Mapping[str, str] = field(default_factory=dict)
    """Tensor -> another dtype that it may have while the rest has the working dtype (a float32 weight with 16-bit x)."""
    deterministic: bool = True
    """Two runs on equal inputs give equal bits."""
    fills: tuple[str, ...] = ()
    """aten operators that this operator stands in for where they are missing."""
    neighbours: tuple[str, ...] = ()
    """What usually follows in a model ("linear"), for costing it in a block."""

    def __post_init__(self) -> None:
        known = [*self.arguments, *self.outputs, *self.saved]
        tensors = [*self.tensors, *self.outputs, *self.saved]
        for what, names in (("shapes", self.shapes), ("uses", self.uses), ("mixed", self.mixed)):
            for name in names:
                if name not in known:
                    raise self._error(f"`{what}` names {name!r}", f"its tensors are {', '.join(tensors)}")
        for name in tensors:
            if name not in self.shapes:
                raise self._error(f"`shapes` lacks {name!r}", "every tensor argument, output and saved tensor has a shape")
        for name, reads in self.uses.items():
            for read in reads:
                if read not in tensors:
                    problem = f"`uses` says that the gradient of {name!r} reads {read!r}"
                    raise self._error(problem, f"its tensors are {', '.join(tensors)}")
        self._check_signatures(known)
        self._check_independent()
        if (self.backward is None) != (not self.uses):
            raise self._error("`backward` and `uses` go together", "declare both or neither")
        for name in self.longest:
            if name.removeprefix("grad ") not in known:
                raise self._error(f"`longest` names {name!r}", "outputs, saved tensors, or 'grad ' and a differentiable input")

    def _check_signatures(self, known: list[str]) -> None:
        """The reference returns what is declared; its backward takes gradients, then known names, then `needs`."""
        returned = inspect.signature(self.reference, eval_str=True).return_annotation
        number = len(typing.get_args(returned)) if typing.get_origin(returned) is tuple else 1
        declared = [*self.outputs, *self.saved]
        if number != len(declared):
            limit = f"`outputs` and `saved` name {len(declared)}: {', '.join(declared)}"
            raise self._error(f"the reference is annotated to return {number} result(s)", limit)
        if self.backward is None:
            return
        parameters = list(inspect.signature(self.backward).parameters)
        gradients, reads = parameters[: len(self.outputs)], parameters[len(self.outputs) : -1]
        if any(name in known for name in gradients) or any(name not in known for name in reads) or parameters[-1:] != ["needs"]:
            limit = "one gradient per output, then inputs, outputs and saved tensors by name, then `needs`"
            raise self._error(f"its backward takes ({', '.join(parameters)})", limit)

    def _check_independent(self) -> None:
        texts = {name: [t.removeprefix("*").partition("|")[0] for t in text.split()] for name, text in self.shapes.items()}
        for letter in self.independent:
            if not any(letter in texts[name] for name in self.tensors) or not any(letter in texts[name] for name in self.outputs):
                raise self._error(f"`independent` names {letter!r}", "letters that an argument and an output have")
            for name in (*self.outputs, *self.saved):
                if letter in self.longest.get(name, "").split():
                    raise self._error(f"`independent` names {letter!r}", f"`longest` says that {name!r} sums over it")
            for name, found in texts.items():
                if found.count(letter) > 1:
                    raise self._error(f"`independent` names {letter!r}", f"{name!r} has it twice")

    def _error(self, problem: str, limit: str) -> DeclarationError:
        way_out = f"correct `op = Op(...)` in {self.package or 'its folder'}, or its reference"
        return DeclarationError("KDK-DECLARATION", f"operator {self.name}: {problem}", limit=limit, way_out=way_out)

    @property
    def name(self) -> str:
        return self.reference.__name__

    @property
    def package(self) -> str:
        """The import name of the operator's folder."""
        return self.reference.__module__.rpartition(".")[0]

    @property
    def summary(self) -> str:
        """The first line of the documentation."""
        return (inspect.getdoc(self.reference) or "").partition("\n")[0]

    @property
    def arguments(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.reference, eval_str=True).parameters)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensor arguments."""
        return tuple(name for name, p in self.arguments.items() if "Tensor" in str(p.annotation))

    def function(self, direction: str) -> Callable[..., Any] | None:
        """The reference of a direction, "forward" or "backward"."""
        return self.reference if direction == "forward" else self.backward
