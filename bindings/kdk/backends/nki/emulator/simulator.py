"""nki.jit and nki.simulate: run a kernel on host arrays, on one core or two."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from . import access, blas, core, host, parser_subset
from .allocation import check_capacity
from .core import Core
from .cost.records import Record
from .cost.report import report
from .errors import build_error, need, refuse
from .lnc import Pair
from .memory import HBM, SHARED
from .tensor import NkiTensor

LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"


class Kernel:
    """What nki.jit makes of a function. kernel[2] launches on two cores."""

    def __init__(self, function: Callable[..., Any], grid: int = 0) -> None:
        self.function, self.grid = function, grid
        self.schedule: list = []
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: Any) -> Kernel:
        need(not isinstance(grid, bool) and grid in (1, 2), "lnc", f"grid {grid!r}; one integer, 1 or 2")
        kernel = Kernel(self.function, grid)
        kernel.schedule = self.schedule
        return kernel

    def with_schedule(self, edges: Sequence) -> Kernel:
        """Order instructions by their names: (consumer, producer) or (consumer, [producers]).

        The emulator keeps program order; instructions that a schedule may reorder do not depend on each other.
        """
        kernel = Kernel(self.function, self.grid)
        kernel.schedule = [(consumer, *((p,) if isinstance(p, str) else p)) for consumer, p in edges]
        return kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if core.running() is not None:  # a kernel called by a kernel is inlined
            return self.function(*args, **kwargs)
        if os.environ.get("NKI_SIMULATOR") == "1":
            return Simulation(self)(*args, **kwargs)
        raise RuntimeError("this process emulates NKI and has no Neuron device: use nki.simulate(kernel)(...) or NKI_SIMULATOR=1")


COMPILER_ARGUMENTS = {"mode", "debug_kernel", "show_compiler_tb", "experimental_flags"}


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    compile_config: Any = None,
    specialization_config: Any = None,
    **old: Any,
) -> Any:
    """Mark a function as a kernel. Of older versions' arguments, those for the compiler only have no effect, as there."""
    unknown = set(old) - COMPILER_ARGUMENTS
    if unknown:
        refuse("removed", f"nki.jit({', '.join(sorted(unknown))}=)")
    if isinstance(fn, Kernel):
        return fn
    return Kernel(fn) if fn is not None else Kernel


class Simulation:
    """A kernel to be called with arrays. `report` and `trace` tell about the last call."""

    def __init__(self, kernel: Any, target: str | None = None, data: bool = True, frontend: str = "tracer") -> None:
        self.kernel = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
        self.target, self.data, self.frontend = target, data, frontend
        self.report: dict[str, Any] = {}
        self.trace: list[Record] = []
        self.cores: list[Core] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.frontend == "parser":
            parser_subset.check(self.kernel.function, args, kwargs)
        arguments: dict[int, host.Argument] = {}
        lifted = [self._lift(x, f"arg{i}", arguments) for i, x in enumerate(args)]
        named = {name: self._lift(x, name, arguments) for name, x in kwargs.items()}
        with blas.one_thread():
            cores, returned = self._run(lifted, named)
        names = {r.name for c in cores for r in c.trace}
        for name in (n for edge in self.kernel.schedule for n in edge):
            need(name in names, "argument", f"with_schedule: no instruction has the name {name!r}")
        for c in cores:
            check_capacity(c)
        self.cores = cores
        self.trace = [r for c in cores for r in c.trace]
        self.report = report(cores)
        return self._results(returned, list(arguments.values()))

    def _lift(self, x: Any, name: str, arguments: dict[int, host.Argument]) -> Any:
        """Arrays as tensors, also inside tuples, lists, dicts and NKI objects; the same array is one tensor."""
        if host.is_array(x):
            if id(x) not in arguments:
                arguments[id(x)] = host.Argument(x, name, self.data, SHARED if self.kernel.grid == 2 else HBM)
            return arguments[id(x)].tensor()
        if isinstance(x, (tuple, list)):
            parts = [self._lift(v, f"{name}_{i}", arguments) for i, v in enumerate(x)]
            return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
        if isinstance(x, dict):
            return {k: self._lift(v, f"{name}_{k}", arguments) for k, v in x.items()}
        return x

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Core], Any]:
        generation = core.generation_of(self.target)
        grid = self.kernel.grid
        configured = os.environ.get(LNC_VARIABLE)
        if configured and configured != str(grid or 1):
            refuse("lnc", f"launched on {grid or 1} cores with {LNC_VARIABLE}={configured}; the runtime refuses that")
        if grid < 2:
            single = Core(generation, grid=grid, data=self.data, frontend=self.frontend)
            before = core.running()
            core.enter(single)
            try:
                return [single], self.kernel.function(*args, **kwargs)
            finally:
                core.enter(before)
        need(generation >= 3, "generation", "kernel[2] needs gen3")
        return self._run_pair(generation, args, kwargs)

    def _run_pair(self, generation: int, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Core], Any]:
        pair = Pair()
        cores = [Core(generation, index=i, grid=2, data=self.data, frontend=self.frontend, pair=pair) for i in range(2)]
        returned: list[Any] = [None, None]
        errors: list[BaseException] = []

        def work(c: Core) -> None:
            with pair.turn:
                core.enter(c)
                try:
                    returned[c.index] = self.kernel.function(*args, **kwargs)
                except BaseException as error:
                    errors.append(error)
                finally:
                    core.enter(None)
                    pair.end()

        threads = [threading.Thread(target=work, args=(c,), name=f"nki core {c.index}") for c in cores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        _compare_cores(*cores)
        return cores, returned[0]

    def _results(self, returned: Any, arguments: list[host.Argument]) -> Any:
        by_storage = {id(a.storage): a for a in arguments}
        torch = next((a.torch for a in arguments if a.torch is not None), None)
        written = [a for a in arguments if a.storage.written]
        if returned is None:
            need(written, "output", "the kernel returns nothing and writes no argument")
        for argument in written:
            self._check_complete(argument.tensor(), argument=True)

        def lower(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return type(value)(lower(v) for v in value)
            if isinstance(value, dict):
                return {k: lower(v) for k, v in value.items()}
            if value is None:
                return None
            if not isinstance(value, NkiTensor):
                raise TypeError(f"a kernel returns tensors, not {type(value).__name__}")
            if value.buffer is not SHARED and id(value.storage) not in by_storage:
                refuse("output", f"the kernel returns {value}")
            self._check_complete(value, argument=id(value.storage) in by_storage)
            return host.result(value, by_storage, torch, self.data)

        results = lower(returned)
        for argument in arguments:
            argument.write_back()
        return results

    def _check_complete(self, t: NkiTensor, argument: bool) -> None:
        """Every element of an output must hold data that somebody wrote and that may be used."""
        storage = t.storage
        if not self.data:
            if storage.poison is not None:
                raise access.poisoned(t, f"output {t} receives data that may not be used")
            missing = math.prod(storage.shape) - storage.elements_written
            need(argument or missing <= 0, "output", f"output {t}: at least {missing} elements are never written")
            return
        fine = access.usable(t)
        if fine is True:
            return
        where = tuple(int(i) for i in next(iter(zip(*(~fine).nonzero()))))  # type: ignore[operator]
        unwritten = storage.poison is None
        what = "were never written" if unwritten else "come from data that may not be used"
        text = f"{int((~fine).sum())} of {t.size} elements of output {t} {what}, the first at {where}"  # type: ignore[operator]
        raise build_error("output", text) if unwritten else access.poisoned(t, text)


def _compare_cores(first: Core, second: Core) -> None:
    """The cores must agree on their dynamic control flow; static differences are legal, but idle one of them."""
    if first.trips != second.trips:
        pairs = zip([*first.trips, "nothing"], [*second.trips, "nothing"])
        ours, theirs = next(p for p in pairs if p[0] != p[1])
        refuse("lnc", f"the dynamic loops of the cores differ: {ours} on core 0, {theirs} on core 1")
    ops = [[r.op for r in c.trace] for c in (first, second)]
    if ops[0] != ops[1]:
        first.lint(f"the cores run {len(ops[0])} and {len(ops[1])} instructions, not the same ones", "kernel")


def simulate(kernel: Any, *, target: str | None = None, data: bool = True, frontend: str = "tracer") -> Simulation:
    """A kernel to be called with arrays, as nki.simulate(kernel) is.

    `target` is trn2 or trn3 (otherwise NEURON_PLATFORM_TARGET_OVERRIDE, otherwise trn2). With data=False every check
    that needs no values runs, and the cost is modelled, without computing anything; the arguments may then be
    `TensorSpec`s or torch tensors on the meta device; a loop with a bound in a register runs once, and a selection by
    value is taken to pick usable elements. `frontend="parser"` also refuses Python that the front end of
    NKI 0.2 to 0.6 does not take, and accepts its dynamic loops; "tracer" is that of NKI 0.7.
    """
    core.generation_of(target)
    if frontend not in core.FRONTENDS:
        raise ValueError(f"frontend {frontend!r}: one of {', '.join(core.FRONTENDS)}")
    return Simulation(kernel, target, data, frontend)
