"""DTensor: which dimensions of an operator may lie on several devices. Derived from the declaration's letters.

Along a letter of `Op.independent` the operator falls into parts: every tensor that has the letter is sharded on it, the others
are replicated, and the gradient of a tensor that lacks it is a sum over the parts (Partial). Everything replicated is always
possible. Any other sharding DTensor undoes before the operator runs, which is right and costs communication: that warns once
per cause (FallbackWarning) and raises under kdk.strict().

    kdk.sharding.explain("rms_norm")    what each letter allows, and why not

Imports torch.distributed.tensor at no time: the rules are given to DTensor when somebody else has imported it.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from kdk import registry
from kdk.errors import FallbackWarning, ShardingError
from kdk.op import Op

DTENSOR = "torch.distributed.tensor"
Label = tuple[str, int]
"""A dimension: its letter, and which of the dimensions of a starred letter it is."""
Register = Callable[[], None]
SHARDED, SUMMED, SAME, IMPOSSIBLE = "sharded", "Partial", "replicated", ""


def explain(name: str) -> str:
    """How DTensor may shard an operator: one line per letter of its shapes. Raises UsageError for an unknown operator."""
    registry.require([name])
    op = registry.OPERATORS[name].op
    lines = [f"{name}: every tensor replicated, or sharded along"]
    for letter in _letters(op):
        if letter not in op.independent:
            lines.append(f"  {letter}: no: {why_not(op, letter)}; DTensor gathers it first")
            continue
        forward = (*op.tensors, *op.outputs)
        parts = [f"{', '.join(t for t in forward if letter in letters(op.shapes[t]))} sharded"]
        rest = [t for t in forward if letter not in letters(op.shapes[t])]
        parts += [f"{', '.join(rest)} replicated"] if rest else []
        parts += [f"gradient of {t} {_gradient(op, t, letter) or 'replicated: first gathered'}" for t in op.uses if t in rest]
        lines.append(f"  {letter}: {'; '.join(parts)}")
    return "\n".join(lines)


def why_not(op: Op, letter: str) -> str:
    """Why a tensor cannot stay sharded along a letter that is not independent."""
    summing = [t for t in (*op.outputs, *op.saved) if letter in op.summed(t)]
    return f"{summing[0]} sums over {letter}" if summing else f"the elements along {letter} belong together"


def letters(text: str) -> list[str]:
    return [token.removeprefix("*").partition("|")[0] for token in text.split()]


def _letters(op: Op) -> list[str]:
    return list(dict.fromkeys(letter for text in op.shapes.values() for letter in letters(text)))


def _gradient(op: Op, tensor: str, letter: str) -> str:
    """What the gradient of a tensor without the letter is on each part."""
    having = [output for output in op.outputs if letter in letters(op.shapes[output])]
    summed = letter in op.summed(f"grad {tensor}")
    if len(having) == len(op.outputs):
        return SUMMED
    # Some outputs are whole on every part: what they give to the gradient must not be added up.
    return IMPOSSIBLE if summed else SAME


def labels(text: str, shape: Sequence[int]) -> list[Label | None]:
    """The dimensions of a tensor of this shape. None: a size of 1 that is shared, or a rank that the letters do not describe."""
    tokens = text.split()
    stars = [i for i, token in enumerate(tokens) if token.startswith("*")]
    if stars:
        at, more = stars[0], len(shape) - len(tokens) + 1
        tokens[at : at + 1] = [tokens[at]] * more
    elif len(shape) < len(tokens):  # rope without a batch
        tokens = tokens[len(tokens) - len(shape) :]
    if len(tokens) != len(shape):
        return [None] * len(shape)
    found: list[Label | None] = []
    for token, size in zip(tokens, shape):
        letter, _, other = token.removeprefix("*").partition("|")
        found.append(None if other == "1" and size == 1 else (letter, tokens[: len(found)].count(token)))
    return found


class Rule:
    """The rule of one direction, as `register_sharding` wants it: called with the arguments, DTensorSpecs for tensors."""

    def __init__(self, op: Op, direction: str) -> None:
        self.op, self.direction = op, direction
        function = op.function(direction)
        assert function is not None
        self.parameters = list(inspect.signature(function).parameters)
        grads = dict(zip(self.parameters, op.outputs)) if direction == "backward" else {}
        self.texts = {p: op.shapes[grads.get(p, p)] for p in self.parameters if grads.get(p, p) in op.shapes}
        self.results = (*op.outputs, *op.saved) if direction == "forward" else tuple(op.uses)

    def __call__(self, *args: Any, impl: str = "") -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        given = dict(zip(self.parameters, args))
        specs = {name: given[name] for name in self.texts if hasattr(given.get(name), "placements")}
        have = {name: labels(self.texts[name], spec.shape) for name, spec in specs.items()}
        self._refuse(specs, have, impl)
        results = {name: self._of_result(name, have) for name in self.results}
        needs = given.get("needs")
        needed = self.results if needs is None else needs.split(",")
        kinds = {SUMMED: Partial(), SAME: Replicate()}
        rules: list[tuple[list[Any], list[Any]]] = [([Replicate()] * len(results), [Replicate()] * len(specs))]
        for split in self._splits([*have.values(), *results.values()]):
            outs = [self._result(name, results[name], split) if name in needed else SAME for name in self.results]
            if IMPOSSIBLE in outs:
                continue

            def shard(dims: list[Label | None], split: set[Label] = split) -> Any:
                return next((Shard(i) for i, label in enumerate(dims) if label in split), Replicate())

            rules.append(
                (
                    [kinds.get(out) or shard(results[name]) for name, out in zip(results, outs)],
                    [shard(dims) for dims in have.values()],
                )
            )
        return rules

    def _of_result(self, name: str, have: dict[str, list[Label | None]]) -> list[Label | None]:
        """The dimensions of a result: those of the arguments; a letter that no argument has is a dimension of its own."""
        present = sorted({label for dims in have.values() for label in dims if label})
        absent = {letter for text in self.texts.values() for letter in letters(text)} - {letter for letter, _ in present}
        dims: list[Label | None] = []
        for token, letter in zip(self.op.shapes[name].split(), letters(self.op.shapes[name])):
            if token.startswith("*"):
                dims += [label for label in present if label[0] == letter]
            elif letter not in absent:
                dims.append((letter, 0))
        return dims

    def _splits(self, tensors: list[list[Label | None]]) -> Iterator[set[Label]]:
        """Sets of dimensions that may be split over the same devices: independent ones that meet in no tensor."""
        free = sorted({label for dims in tensors for label in dims if label and label[0] in self.op.independent})
        for number in range(1, len(self.op.independent) + 1):
            for split in map(set, itertools.combinations(free, number)):
                if all(len(split.intersection(dims)) <= 1 for dims in tensors):
                    yield split

    def _result(self, name: str, dims: list[Label | None], split: set[Label]) -> str:
        kinds = {SHARDED if label in dims else self._without(name, label[0]) for label in split}
        if len(kinds) > 1:
            kinds.discard(SAME)
        return kinds.pop() if len(kinds) == 1 else IMPOSSIBLE

    def _without(self, name: str, letter: str) -> str:
        return SAME if self.direction == "forward" else _gradient(self.op, name, letter)

    def _refuse(self, specs: dict[str, Any], have: dict[str, list[Label | None]], impl: str) -> None:
        """Warn, or raise when strict, of every dimension that must be gathered before the operator can run."""
        op = self.op
        for name, spec in specs.items():
            for placement in spec.placements:
                dim = getattr(placement, "dim", None)  # a strided shard is no subclass of Shard
                label = None if dim is None else have[name][dim]
                if label is None or label[0] in op.independent:
                    continue
                what = f"{op.name}.{self.direction}: {name} {tuple(spec.shape)} is sharded along {label[0]}"
                reason = why_not(op, label[0])
                if impl.endswith("!"):
                    limit = f"{reason}; independent are {', '.join(op.independent) or 'none'}"
                    way_out = f"redistribute {name} first, or leave kdk.strict() and DTensor does; kdk.sharding.explain({op.name!r})"
                    raise ShardingError("KDK-SHARDING", what, value=placement, limit=limit, way_out=way_out)
                warnings.warn(f"{what}, and {reason}: DTensor gathers it before every call", FallbackWarning, stacklevel=2)


def follow(op: Op, forward: Any, backward: Any) -> None:
    """Give DTensor the rules of an operator: now if it is imported, otherwise as soon as it is."""

    def give() -> None:
        _give(forward, Rule(op, "forward"))
        if backward is not None:
            _give(backward, Rule(op, "backward"))

    if DTENSOR in sys.modules:
        give()
    else:
        _watch().waiting.append(give)


def _give(torch_op: Any, rule: Rule) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(torch_op)(rule)
    # DTensor remembers a rule's answer by the tensors and integers alone; ours depends on `needs` and on a strict `impl` too.
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    known[torch_op] = RuntimeSchemaInfo(static_argnum=0, static_kwargkey=["impl"])


class _Watch(MetaPathFinder):
    """Waits for the import of DTensor, and for nothing else."""

    def __init__(self) -> None:
        self.waiting: list[Register] = []

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != DTENSOR:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_tell(module: ModuleType) -> None:
                load(module)
                self._arrived()

            spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec

    def _arrived(self) -> None:
        """Whatever a future torch changed here, its DTensor must stay importable without kdk's rules."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        try:
            for give in self.waiting:
                give()
        except (ImportError, AttributeError, TypeError) as error:
            text = f"kdk operators take no DTensors with this torch: {type(error).__name__}: {error}"
            warnings.warn(text, FallbackWarning, stacklevel=2)


def _watch() -> _Watch:
    """The one watch of this process."""
    for finder in sys.meta_path:
        if isinstance(finder, _Watch):
            return finder
    watch = _Watch()
    sys.meta_path.insert(0, watch)
    return watch
