"""Blocks' programs as they were lowered and compiled, in the user's cache: equal programs are compiled once, and a run that was
stopped goes on where it was. A stored one is used while the program, the kernels' sources and the versions are the same."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kdk import tuning
from kdk.registry import OPERATORS
from kdk_bench.compiling import sources
from kdk_bench.modelled import torchtpu
from kdk_bench.modelled.profiler import Profiler, Program
from kdk_bench.records import environment

HERE = Path(__file__).parent


class Traced(TorchDispatchMode):
    """Notes what a function asks of torch: `found`, the calls of kdk's operators; `text`, every call, its tensors by number."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.found: list[tuple[str, str, tuple[Any, ...]]] = []
        self._lines: list[str] = [", ".join(f"{t.dtype}{list(t.shape)}" for t in given)]
        self._numbers = {id(t): (number, t) for number, t in enumerate(given)}  # with the tensors: an id lives as long as they do

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "kdk":
            name = func._opname
            direction = "forward" if name in OPERATORS else "backward"
            defaults = [a.default_value for a in func._schema.arguments if not a.kwarg_only]
            self.found.append((name.removesuffix("_backward"), direction, (*args, *defaults[len(args) :])))
        results = func(*args, **(kwargs or {}))
        self._lines.append(f"{func}{self._said(args)}{self._said(kwargs or {})} -> {self._said(results)}")
        return results

    def _said(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return f"%{self._numbers.setdefault(id(value), (len(self._numbers), value))[0]}"
        if isinstance(value, dict):
            return str({name: self._said(v) for name, v in value.items()})
        return f"({', '.join(map(self._said, value))})" if isinstance(value, list | tuple) else repr(value)


def number(*what: Any) -> str:
    """Of something that depends on `what` and the versions."""
    text = json.dumps([what, environment(), _torch_tpu()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _torch_tpu() -> list[str]:
    """TorchTPU's version, by the folder that says it: the package may lie where no metadata is looked for."""
    found = importlib.util.find_spec("torch_tpu")
    root = Path(found.origin).parents[1] if found and found.origin else Path(torchtpu.where() or "")
    return sorted(folder.name for folder in root.glob("torch_tpu-*.dist-info"))


def of_program(traced: Traced, target: str) -> str:
    """The number of a traced program as TorchTPU lowers it: one without kernels is the same for every chip."""
    names = sorted({name for name, _, _ in traced.found})
    lowering = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sources.files_behind(torchtpu.__name__) if file.parent == HERE]
    return number("lowered", traced.text, lowering, [(target, name, *_kernels(name, target)) for name in names])


def _kernels(name: str, target: str) -> Iterable[str]:
    op = OPERATORS[name].op
    (folder, *_) = importlib.import_module(op.package).__path__
    entries = {str(key): entry.get("launch") for key, entry in tuning.table(op, target).entries.items()}
    for file in sorted(Path(folder).glob("pallas*.py")):
        yield sources.key(f"{op.package}.{file.stem}", op.package, "pallas", {"launch": entries})


def lowered(key: str) -> tuple[str, str] | None:
    """(StableHLO, "") as `keep` left it."""
    found = sources.load(key)
    return (found["stablehlo"], "") if found else None


def keep(key: str, text: str) -> None:
    """What TorchTPU made of a program; where it made nothing the next run tries again."""
    if text:
        sources.store(key, {"stablehlo": text})


class Stored(Profiler):
    """A profiler that does not do the same twice. What a busy machine cut short, another run may know better: it is not kept."""

    def program(self, stablehlo: str, target: str) -> Program:
        key = number("profiled", stablehlo, target, self.limit)
        found = sources.load(key)
        if found:
            return Program(**found)
        program = super().program(stablehlo, target)
        if program.text and (program.but or not program.why_not):
            sources.store(key, asdict(program))
        return program
