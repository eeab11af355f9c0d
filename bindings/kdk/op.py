"""The declaration of an operator: the one place that says what it is. Imports no torch."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kdk.compare import Choice, Quantised
from kdk.errors import DeclarationError


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operator, declared in its folder's `__init__.py` as `op`. Its name is the reference's.

    Shapes are written in letters, one string per tensor: "*N H" is any number of leading dimensions with N elements in all,
    then H columns; a starred letter may stand anywhere, once ("N C *P"). The same letter is the same size everywhere; "B|1" is B
    or 1.

    Arguments are tensors, tensors that may be left out (`bias: Optional[Tensor] = None`: then there is no gradient for them
    either), and scalars: int, float, bool, str, torch.dtype, and each of these or None. The dtypes of results are what the
    reference says.
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
    fake: Callable[..., Any] | None = None
    """What the reference returns, without its work: shapes and dtypes from the arguments, no value read. torch.compile traces it in
    the reference's place. Only for a reference whose Python depends on a size, as a loop over time does: traced, that fixes the
    size, and every new one is compiled anew."""
    fake_backward: Callable[..., Any] | None = None
    """The same for `backward`, with None for the same gradients."""
    saved: tuple[str, ...] = ()
    """Names of the reference's trailing results, kept for backward; the same for every implementation."""
    uses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Differentiable input -> the inputs, outputs and saved tensors that its gradient reads."""
    longest: Mapping[str, str] = field(default_factory=dict)
    """Output, saved tensor, or gradient ("grad x") -> letters whose product is the longest sum behind one element. "C/G" is one
    G-th of C: the channels of a group."""
    independent: tuple[str, ...] = ()
    """Letters along which the operator falls into independent parts: on a part of every tensor that has the letter, and all of
    the others, it gives that part of the results that have it. Rows of a norm, not its columns. DTensor shards along these."""
    flops: Mapping[str, Callable[..., int]] = field(default_factory=dict)
    """"forward" and "backward" -> floating-point operations, from the letters' sizes by keyword."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """Working dtypes, beside float64, which the reference alone takes."""
    mixed: Mapping[str, str] = field(default_factory=dict)
    """Tensor -> another dtype that it may have while the rest has the working dtype (a float32 weight with 16-bit x)."""
    indexes: Mapping[str, str] = field(default_factory=dict)
    """Integer tensor argument (int64 or int32) -> the letter that it points into: its values lie in [0, size of the letter).
    Kernels of a language get int32 where the size allows. Under strict the values are checked; otherwise one out of range is
    undefined, as the operator documents."""
    sentinels: Mapping[str, str] = field(default_factory=dict)
    """Tensor of `indexes` -> the scalar argument whose value it may also hold (`ignore_index`)."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Floating-point tensor argument -> the least value it is meant to hold, and the one that all values lie below. For whoever
    draws values to try; nothing checks them in a call, as that would wait for the device."""
    sized: Mapping[str, str] = field(default_factory=dict)
    """Letter -> the int argument that is its size (the K of a top-k -> "k"). It may be a letter of no tensor."""
    choice: Choice | None = None
    """The results that are a discrete choice, and how it is judged."""
    quantised: Mapping[str, Quantised] = field(default_factory=dict)
    """Quantised output -> its scale and the values before quantisation."""
    layouts: tuple[str, ...] = ()
    """Memory formats that are kept, beside contiguous: "channels_last" (a 5-D tensor: channels_last_3d). A result has the format
    of the first tensor argument with 4 or 5 dimensions, where both have as many; every other result is contiguous."""
    public: Callable[..., Any] | None = None
    """What `kdk.ops.<name>` is, where that is more than the operator: plain torch, called with the operator first, then the
    public arguments. Its signature and docstring are the public ones; everything else is about the operator alone."""
    backward_by: str = ""
    """Another operator that computes the one gradient: its kernels are the kernels of this backward."""
    backward_as: Callable[..., tuple[Any, ...]] | None = None
    """With `backward_by`: from the arguments of `backward`, those of that operator."""
    deterministic: bool | Callable[..., bool] = True
    """Two runs on equal inputs give equal bits. A function of the scalar arguments, by keyword, where it depends on them."""
    fills: tuple[str, ...] = ()
    """aten operators that this operator stands in for where they are missing."""
    neighbours: tuple[str, ...] = ()
    """What usually follows in a model ("linear"), for costing it in a block."""

    def __post_init__(self) -> None:
        known = [*self.arguments, *self.outputs, *self.saved]
        tensors = [*self.tensors, *self.outputs, *self.saved]
        for what in ("shapes", "uses", "mixed", "indexes", "sentinels", "ranges", "quantised"):
            for name in getattr(self, what):
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
        self._check_letters()
        self._check_signatures(known)
        self._check_fakes()
        self._check_independent()
        self._check_kinds()
        if (self.backward is None) != (not self.uses):
            raise self._error("`backward` and `uses` go together", "declare both or neither")
        for name in self.longest:
            if name.removeprefix("grad ") not in known:
                raise self._error(f"`longest` names {name!r}", "outputs, saved tensors, or 'grad ' and a differentiable input")

    def _check_letters(self) -> None:
        if self.kind not in typing.get_args(inspect.get_annotations(Op, eval_str=True)["kind"]):
            raise self._error(f"`kind` is {self.kind!r}", "elementwise, row or algorithmic")
        for name, text in self.shapes.items():
            tokens = text.split()
            if text.count("*") > 1 or not all(re.fullmatch(r"\*?[A-Za-z]\w*(\|1)?", token) for token in tokens):
                raise self._error(f"`shapes` says {name!r}: {text!r}", 'letters, one of them starred at most: "*N H", "B|1 S"')
        letters = self.letters
        for name, text in self.longest.items():
            if not letters.issuperset(text.replace("/", " ").split()):
                raise self._error(f"`longest` says {name!r}: {text!r}", f"the letters are {', '.join(sorted(letters))}")

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

    def _check_fakes(self) -> None:
        """A fake is called in the place of its function."""
        for what, fake, function in (("fake", self.fake, self.reference), ("fake_backward", self.fake_backward, self.backward)):
            if fake is None:
                continue
            if function is None:
                raise self._error(f"`{what}` without a `backward`", "declare both, or no fake_backward")
            took, takes = (", ".join(inspect.signature(f).parameters) for f in (fake, function))
            if took != takes:
                raise self._error(f"its `{what}` takes ({took})", f"what {function.__name__} takes: ({takes})")

    def _check_independent(self) -> None:
        texts = {name: [t.removeprefix("*").partition("|")[0] for t in text.split()] for name, text in self.shapes.items()}
        for letter in self.independent:
            if not any(letter in texts[name] for name in self.tensors) or not any(letter in texts[name] for name in self.outputs):
                raise self._error(f"`independent` names {letter!r}", "letters that an argument and an output have")
            for name in (*self.outputs, *self.saved):
                if letter in self.summed(name):
                    raise self._error(f"`independent` names {letter!r}", f"`longest` says that {name!r} sums over it")
            for name, found in texts.items():
                if found.count(letter) > 1:
                    raise self._error(f"`independent` names {letter!r}", f"{name!r} has it twice")

    def _check_kinds(self) -> None:
        """Integers, letters that are arguments, choices, quantised outputs, and a backward by another operator."""
        letters = self.letters
        scalars = [name for name in self.arguments if name not in self.tensors]
        for name, letter in self.indexes.items():
            if name not in self.tensors or name in self.uses or name in self.mixed:
                raise self._error(f"`indexes` names {name!r}", "tensor arguments of integers, which have no gradient and no other dtype")
            if letter not in letters or letter in self.independent:
                raise self._error(f"`indexes` says that {name!r} points into {letter!r}", "a letter that is not independent")
        for name, scalar in self.sentinels.items():
            if name not in self.indexes or scalar not in scalars:
                raise self._error(f"`sentinels` says {name!r}: {scalar!r}", "a tensor of `indexes`: a scalar argument")
        for name, (low, high) in self.ranges.items():
            if name not in self.tensors or name in self.indexes or not low < high:
                limit = "a tensor argument of floating-point numbers: (least, more than the largest)"
                raise self._error(f"`ranges` says {name!r}: {(low, high)}", limit)
        for letter, scalar in self.sized.items():
            if scalar not in scalars:
                raise self._error(f"`sized` says {letter!r}: {scalar!r}", f"the scalar arguments are {', '.join(scalars)}")
        results = (*self.outputs, *self.saved)
        for name in self.choice.outputs if self.choice else ():
            if name not in results:
                raise self._error(f"`choice` names {name!r}", f"its results are {', '.join(results)}")
        for name, how in self.quantised.items():
            if name not in self.outputs or how.scale not in self.outputs or how.scale in self.quantised:
                raise self._error(f"`quantised` says {name!r} with scale {how.scale!r}", f"two of {', '.join(self.outputs)}")
        for layout in self.layouts:
            if layout != "channels_last":
                raise self._error(f"`layouts` names {layout!r}", "there is channels_last")
        if bool(self.backward_by) != (self.backward_as is not None) or (self.backward_by and len(self.uses) != 1):
            raise self._error("`backward_by` and `backward_as` go together, with one differentiable input", "declare both or neither")

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
        return (inspect.getdoc(self.public or self.reference) or "").partition("\n")[0]

    @property
    def signature(self) -> inspect.Signature:
        """What users call takes and returns."""
        if self.public is None:
            return inspect.signature(self.reference, eval_str=True)
        signature = inspect.signature(self.public, eval_str=True)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    @property
    def arguments(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.reference, eval_str=True).parameters)

    @property
    def letters(self) -> set[str]:
        """Those of the declared shapes, and those that are arguments."""
        return {token.strip("*").partition("|")[0] for text in self.shapes.values() for token in text.split()} | set(self.sized)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensor arguments."""
        return tuple(name for name, p in self.arguments.items() if "Tensor" in str(p.annotation))

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of the tensor arguments that may be left out."""
        return tuple(name for name in self.tensors if self.arguments[name].default is None)

    def summed(self, name: str) -> tuple[str, ...]:
        """The letters that an output, saved tensor or gradient ("grad x") sums over, by `longest`."""
        return tuple(token.partition("/")[0] for token in self.longest.get(name, "").split())

    def function(self, direction: str) -> Callable[..., Any] | None:
        """The reference of a direction, "forward" or "backward"."""
        return self.reference if direction == "forward" else self.backward

    def described(self, direction: str) -> Callable[..., Any] | None:
        """What gives a direction's results their shapes and dtypes: the declared fake, or the reference itself."""
        fake = self.fake if direction == "forward" else self.fake_backward
        return fake or self.function(direction)
