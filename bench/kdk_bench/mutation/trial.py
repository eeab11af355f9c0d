"""One mutant, swapped in for the operator's kernel and judged on the quick tier's cases until one fails."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import linecache
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from kdk.backends import LANGUAGES
from kdk.errors import RefusedError, SimulationError
from kdk.registry import OPERATORS
from kdk_bench.check import Result, Row, pooled, run_case
from kdk_bench.generate import Problem, problems
from kdk_bench.mutation.units import Reach, Unit
from kdk_bench.numerics import Pool
from kdk_bench.places import Place, place

DTYPES = ("float32", "bfloat16")
# Refusals of the simulators that depend on where a kernel reads and writes. All others say that it is no valid kernel, as a
# compiler would: Triton's bounds, alignment, races, collisions, wrapped offsets; Pallas' bounds, races, blocks written twice,
# uninitialised memory; NKI's uninitialised data, incomplete outputs, accesses out of bounds, accumulators never started.
SANITIZER = {
    "KDK-TRITON-BOUNDS",
    "KDK-TRITON-MISALIGNED",
    "KDK-TRITON-RACE",
    "KDK-TRITON-COLLISION",
    "KDK-TRITON-OVERFLOW",
    "KDK-PALLAS-BOUNDS",
    "KDK-PALLAS-RACE",
    "KDK-PALLAS-REVISIT",
    "KDK-PALLAS-SEMAPHORE",
    "KDK-PALLAS-UNINITIALIZED",
    "C9",
    "C14",
    "C15",
    "C16",
    "C22",
}
Step = tuple[str, str]  # dtype, case
Line = tuple[str, int]  # module, line number


@dataclass(frozen=True)
class Trial:
    """What became of a mutant. kill: numerics, sanitizer, crash, "" (survived) or "stillborn" (no case ran to its end)."""

    kill: str
    step: Step | None = None
    reason: str = ""
    cause: str = ""  # what the diagnosis says first, where numerics killed
    details: str = ""
    seconds: float = 0.0  # of processor time
    lines: frozenset[Line] = frozenset()  # that ran, where that was asked
    by: str = ""  # the other unit whose cases killed it, where its own did not
    costs: dict[str, float] = field(default_factory=dict)  # seconds of processor time of every case, of a kernel that passes


def steps(unit: Unit) -> list[Step]:
    """The quick tier's cases that reach the kernel: an empty tensor never does."""
    op = OPERATORS[unit.op].op
    names = [p.name for p in problems(op, unit.direction) if p.elements]
    return [(dtype, name) for dtype in DTYPES if dtype in op.dtypes for name in names]


@functools.cache
def uncounted(unit: Unit) -> frozenset[str]:
    """The cases of a single element."""
    return frozenset(p.name for p in problems(OPERATORS[unit.op].op, unit.direction) if not p.counted)


PREFIX = "<planted "  # of the file name of a planted module


# ---- swapping ---------------------------------------------------------------------------------------------------------


def _execute(name: str, source: str) -> ModuleType:
    """A module from source text, as if it had been imported. Triton and NKI read a kernel's lines: linecache has them."""
    path = f"{PREFIX}{name}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    module = ModuleType(name)
    module.__package__ = name.rpartition(".")[0]
    module.__file__ = path
    sys.modules[name] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    return module


def _text(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()


def original(unit: Unit) -> tuple[str, str]:
    """A unit's file, unchanged, with its name: what is planted to see that the kernel passes without a fault."""
    entry = Reach(OPERATORS[unit.op].op, unit.direction, unit.language).entry
    return entry, _text(entry)


@contextlib.contextmanager
def planted(unit: Unit, changed: str, source: str) -> Iterator[None]:
    """Inside, the unit's kernel is what its files say with `source` in place of the file `changed`."""
    LANGUAGES[unit.language].module("launch").prepare()
    reach = Reach(OPERATORS[unit.op].op, unit.direction, unit.language)
    real = importlib.import_module(reach.entry)
    texts = {name: source if name == changed else _text(name) for name in reach.sources}
    before = {name: importlib.import_module(name) for name in texts}
    function = getattr(real, unit.direction)
    try:
        for name, text in texts.items():
            module = _execute(name, text)
        setattr(real, unit.direction, getattr(module, unit.direction))
        sys.modules.update(before)
        yield
    finally:
        sys.modules.update(before)
        setattr(real, unit.direction, function)
        _forget()


def _forget() -> None:
    """Drop what was compiled for a kernel that never comes again."""
    if "jax" in sys.modules:
        import jax

        from kdk.backends.pallas import simulate

        simulate.forget()
        jax.clear_caches()


class Traced:
    """The lines of planted modules that run inside a `with`, one for each case.

    Tracing slows a kernel's simulator by several times, and a program runs the lines that another one ran: after CALLS of planted
    functions the rest of a case is not traced.
    """

    CALLS = 1000

    def __init__(self) -> None:
        self.lines: set[Line] = set()
        self.calls, self.before = 0, sys.gettrace()

    def __enter__(self) -> None:
        self.calls, self.before = 0, sys.gettrace()
        sys.settrace(self._call)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self.before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PREFIX):
            return None
        self.calls += 1
        if self.calls > self.CALLS:
            sys.settrace(self.before)
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.lines.add((frame.f_code.co_filename[len(PREFIX) : -1], frame.f_lineno))
        return self._line


# ---- judging ----------------------------------------------------------------------------------------------------------


class _Cases:
    """The cases of a unit, run one at a time with the pools of each dtype."""

    def __init__(self, unit: Unit, seed: int) -> None:
        self.operator, self.unit, self.seed = OPERATORS[unit.op], unit, seed
        target = LANGUAGES[unit.language].targets[0]
        self.place: Place = place(unit.language, target)
        self.rows = {d: Row(unit.op, unit.direction, unit.language, target, d) for d in DTYPES}
        self.problems: dict[str, Problem] = {p.name: p for p in problems(self.operator.op, unit.direction, seed=seed)}
        self.first = next(iter(self.problems))
        self.pools: dict[str, dict[str, Pool]] = {d: {} for d in DTYPES}

    def run(self, step: Step) -> tuple[str, str, Result | None]:
        """(numerics, sanitizer, crash, refused or "" for a pass; why; the result)."""
        dtype, name = step
        twice = name == self.first
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = run_case(self.operator, self.rows[dtype], self.problems[name], self.place, self.seed, self.pools[dtype], twice)
        except RefusedError as error:
            return "refused", str(error), None
        except SimulationError as error:
            return "sanitizer" if error.code in SANITIZER else "crash", str(error), None
        except Exception as error:
            return "crash", f"{type(error).__name__}: {error}", None
        return "numerics" if result.outcome == "failed" else "", result.reason, result

    def pooled(self) -> tuple[str, str]:
        """(dtype, why) of the first pool that refuses."""
        for dtype in DTYPES:
            for result in pooled(self.rows[dtype], self.pools[dtype]):
                if result.outcome == "failed":
                    return dtype, result.reason
        return "", ""


def run_original(unit: Unit, shares: bool, seed: int) -> Trial:
    """All cases of the unchanged kernel in one dtype, which pass. shares: others run its code too, so say which lines it runs itself.

    The other dtype's cases, which `kdk check` runs as well, are left out.
    """
    traced = Traced() if shares else None
    order = steps(unit)
    trial = run_mutant(unit, *original(unit), [step for step in order if step[0] == order[0][0]], seed, traced)
    return trial if traced is None or trial.kill else dataclasses.replace(trial, lines=frozenset(traced.lines))


def allow(seconds: float) -> None:
    """Let this process compute for so long from now on: then the system ends it, also where it is deep in compiled code."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 1, resource.RLIM_INFINITY))


def run_mutant(
    unit: Unit,
    changed: str,
    source: str,
    order: Sequence[Step],
    seed: int,
    traced: Traced | None = None,
    limits: Mapping[str, float] | None = None,
) -> Trial:
    """Judge a mutant. It counts if some case runs to a verdict; the first case that fails decides how it was killed.

    limits: seconds of processor time by case, past which the process ends.
    """
    begin = time.process_time()
    costs: dict[str, float] = {}

    def trial(kill: str, step: Step | None = None, reason: str = "", cause: str = "", details: str = "") -> Trial:
        seconds = time.process_time() - begin
        return Trial(kill, step, " ".join(reason.split())[:300], cause, details[:200], seconds, costs={} if kill else costs)

    crash: tuple[Step, str] | None = None
    ran = False
    try:
        with planted(unit, changed, source):
            cases = _Cases(unit, seed)
            for step in order:
                if limits is not None:
                    allow(limits[step[1]])
                before = time.process_time()
                with traced or contextlib.nullcontext():
                    kill, reason, result = cases.run(step)
                costs[step[1]] = time.process_time() - before
                ran = ran or kill in ("", "numerics", "sanitizer")
                if kill == "crash":
                    crash = crash or (step, reason)
                elif crash is None and kill in ("numerics", "sanitizer"):
                    cause, details = _diagnosed(result)
                    return trial(kill, step, reason, cause, details)
                if crash is not None and ran:
                    return trial("crash", *crash)
            if crash is None and ran:
                dtype, reason = cases.pooled()
                return trial("numerics", (dtype, "pooled"), reason) if dtype else trial("")
    except Exception as error:  # the changed file cannot even be executed
        return trial("stillborn", None, f"{type(error).__name__}: {error}")
    return trial("stillborn", *(crash or (None, "refused")))


def _diagnosed(result: Result | None) -> tuple[str, str]:
    diagnose: Callable[[], Any] | None = result.diagnose if result is not None else None
    try:
        found = diagnose() if diagnose is not None else None
    except Exception as error:
        return "unknown", f"no diagnosis: {type(error).__name__}: {error}"
    return (found.cause, found.details) if found is not None else ("", result.reason if result is not None else "")
