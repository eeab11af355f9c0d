"""Faults of Pallas kernels, found by jax's TPU interpreter: it plays memory spaces, DMAs, semaphores and cores.

What it calls legal and a TPU too: blocks that reach past the edge of an array (Pallas pads them, with anything).
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdk.errors import FallbackWarning, SimulationError

# Beyond these sizes only values are simulated. On one core of a server: compiling for the interpreter takes 0.3 s (for two
# cores 0.6 s, every time), running 10 ms a grid point at first and growing with their square (64 points 0.7 s, 256 points
# 3.9 s, 1024 points 47 s), and 0.1 s for a million elements. Simulating only values takes 0.2 s, nearly all of it compiling.
MOST_POINTS = 64  # of all grids of a call
MOST_ACCESSES = 400  # of memory, DMAs and semaphores, by all kernels of a call over all grid points: each is a call into Python
MOST_ELEMENTS = 1 << 20  # of all arguments
# What a search finds hangs on the form of a call, not on its numbers: so many forms of a kernel with dtypes are searched, and each so
# often, with other scalars or, where data choose the blocks, with other data.
MOST_FORMS = 4
MOST_OF_A_FORM = 2

# Memory that nothing was written to holds one thing in one run and another in the other; a DMA moves its data when it
# starts, or when somebody waits for it; parallel grid points come in another order. A right kernel does not notice.
# Both are the same program to XLA, which else may round differently.
RUNS = ({"uninitialized_memory": "zero", "dma_execution_mode": "eager", "random_seed": 0},
        {"uninitialized_memory": "nan", "dma_execution_mode": "on_wait", "random_seed": 1})  # fmt: skip

# Searches that found nothing: by function, dtypes and kernel; form; and with which scalars.
_FAULTLESS: dict[tuple[Any, ...], dict[frozenset[tuple[bool, bool]], list[tuple[Any, ...]]]] = {}
_ONE_AT_A_TIME = threading.Lock()  # the interpreter's memory is global


@dataclass(frozen=True)
class Kernel:
    """One pallas_call of a traced function. parallel: a dimension of its grid with more than one point is declared so.

    form: of the dimensions of its arrays, whether they are one block or more, and whether the last reaches past the edge.
    """

    name: str
    points: int
    parallel: bool
    form: frozenset[tuple[bool, bool]]
    prefetches: bool
    """Values of an argument may choose blocks."""
    accesses: int
    """Of memory, DMAs and semaphores, over all points."""


def kernels(program: Any) -> list[Kernel]:
    """The pallas_calls of a jaxpr."""
    return [_kernel(equation.params) for equation in _pallas_calls(program)]


def _pallas_calls(program: Any) -> Iterator[Any]:
    for equation in program.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _pallas_calls(inner)


def _kernel(params: Any) -> Kernel:
    grid = [size for size in params["grid_mapping"].grid if isinstance(size, int)]
    semantics = getattr(params["compiler_params"], "dimension_semantics", None) or ()
    parallel = any("parallel" in str(s).lower() and size > 1 for s, size in zip(semantics, grid))
    form = set()
    for mapping in params["grid_mapping"].block_mappings:
        for size, block in zip(mapping.array_aval.shape, mapping.block_shape):
            width = getattr(block, "block_size", 1)  # a squeezed dimension has none
            form.add((size > width, size % width != 0))
    name = params["name"] or params["jaxpr"].debug_info.func_name
    points, prefetches = math.prod(grid), params["grid_mapping"].num_index_operands > 0
    accesses = points * (len(params["grid_mapping"].block_mappings) + _accesses(params["jaxpr"]))
    return Kernel(name, points, parallel, frozenset(form), prefetches, accesses)


# Primitives that the interpreter plays by a call into Python.
PLAYED = {
    "get", "swap", "addupdate", "load", "masked_load", "masked_swap", "dma_start", "dma_wait", "semaphore_signal", "semaphore_wait",
}  # fmt: skip


def _accesses(program: Any) -> int:
    """How often a jaxpr touches memory or semaphores, loops run to their end and the longest branch taken."""
    total = 0
    for equation in program.eqns:
        total += equation.primitive.name in PLAYED
        inner = [getattr(v, "jaxpr", v) for value in equation.params.values() for v in (value if isinstance(value, tuple) else (value,))]
        counts = [_accesses(body) for body in inner if hasattr(body, "eqns")]
        if equation.primitive.name == "cond":
            total += max(counts, default=0)
        else:
            total += equation.params.get("length", 1) * sum(counts) if equation.primitive.name == "scan" else sum(counts)
    return total


def look_for_faults(function: Callable[..., Any], static: tuple[int, ...], args: list[Any]) -> None:
    """Raise SimulationError if a kernel of `function(*args)` has a fault that shows on these arguments, which are jax arrays.

    Nothing is done above MOST_POINTS, MOST_ACCESSES and MOST_ELEMENTS; nor where earlier searches looked at every kernel with these
    dtypes, this form of its grid and these scalars, or as often as MOST_FORMS and MOST_OF_A_FORM allow.
    """
    import jax

    if sum(a.size for a in args if isinstance(a, jax.Array)) > MOST_ELEMENTS:
        return
    found = kernels(jax.make_jaxpr(functools.partial(function, interpret=False), static_argnums=static)(*args).jaxpr)
    if sum(kernel.points for kernel in found) > MOST_POINTS or sum(kernel.accesses for kernel in found) > MOST_ACCESSES:
        return
    dtypes = frozenset(a.dtype.name for a in args if isinstance(a, jax.Array))
    scalars = tuple([a for a in args if not isinstance(a, jax.Array)])
    kinds = [(function, dtypes, kernel.name) for kernel in found]
    if not any(_is_new(_FAULTLESS.get(kind, {}), kernel, scalars) for kind, kernel in zip(kinds, found)):
        return
    where = f"{function.__module__}.{function.__name__} ({', '.join(dict.fromkeys(k.name for k in found))})"
    cores = 2 if any(kernel.parallel for kernel in found) else 1
    results = []
    for i in range(len(RUNS)):
        try:
            results.append(_run(_strict(function, static, i, cores), args, where))
        except NotImplementedError as error:
            text = f"{where}: only its values are simulated; jax's TPU interpreter lacks something: {error}"
            warnings.warn(text, FallbackWarning, stacklevel=2)
            return
    for i, (first, second) in enumerate(zip(*results)):
        _compare(where, i, first, second)
    for kind, kernel in zip(kinds, found):
        _FAULTLESS.setdefault(kind, {}).setdefault(kernel.form, []).append(scalars)


def _is_new(searched: Mapping[frozenset[tuple[bool, bool]], list[tuple[Any, ...]]], kernel: Kernel, scalars: tuple[Any, ...]) -> bool:
    """Whether a search of a kernel may find what earlier ones did not."""
    if kernel.form not in searched:
        return len(searched) < MOST_FORMS
    before = searched[kernel.form]
    return len(before) < MOST_OF_A_FORM and (kernel.prefetches or scalars not in before)


@functools.cache
def exact() -> dict[str, Any]:
    """Options with which XLA computes on a CPU what a kernel says.

    Its library YNNPACK sums a value that was rounded to bfloat16 and widened again as if it had not been rounded (jaxlib 0.10.2).
    Another release may not have that library, nor the option.
    """
    import jax

    without = {"xla_cpu_experimental_ynn_fusion_type": ""}
    try:
        jax.jit(lambda x: x, compiler_options=without).lower(0.0).compile()
    except Exception as error:
        if next(iter(without)) in str(error):
            return {}
        raise
    return without


@functools.cache
def _strict(function: Callable[..., Any], static: tuple[int, ...], run: int, cores: int) -> Callable[..., Any]:
    import jax
    from jax.experimental.pallas import tpu as pltpu

    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=cores, **RUNS[run])

    def interpreted(*args: Any) -> Any:
        return function(*args, interpret=params)

    # The program runs a few times at most: compiling it well costs more than it saves.
    return jax.jit(interpreted, static_argnums=static, compiler_options={"xla_backend_optimization_level": 0, **exact()})


def forget() -> None:
    """Drop the functions that were compiled for kernels."""
    _strict.cache_clear()


def _run(interpreted: Callable[..., Any], args: list[Any], where: str) -> list[np.ndarray]:
    """The results in order, or the error that says what the interpreter raised or printed."""
    import jax
    from jax.experimental.pallas import tpu as pltpu

    said = io.StringIO()
    with _ONE_AT_A_TIME, contextlib.redirect_stdout(said), _without_tracebacks():
        pltpu.reset_tpu_interpret_mode_state()
        try:
            results = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.block_until_ready(interpreted(*args)))]
        except NotImplementedError:
            raise
        except Exception as error:
            raise _raised(where, str(error)) from None
        finally:
            pltpu.reset_tpu_interpret_mode_state()
    race = re.search(r"RACE DETECTED\n(.*?)\n\n", said.getvalue() + "\n\n", re.DOTALL)
    if race:
        accesses = re.findall(r"(read|write) of \(.*?\)\[.*?\] from \S+, \S+? (.*)", race[1])
        what = " and ".join(f"a {kind} ({place})" for kind, place in accesses) or " ".join(race[1].split())
        raise SimulationError(
            "KDK-PALLAS-RACE",
            f"{where}: two accesses to the same memory without an order between them",
            value=what,
            limit="DMAs end where they are waited for; grid points of a parallel dimension share no output block",
        )
    semaphore = re.search(r"Semaphore .* has non-zero count.*", said.getvalue())
    if semaphore:
        raise SimulationError(
            "KDK-PALLAS-SEMAPHORE",
            f"{where}: a semaphore is not back at zero when the kernel ends",
            value=semaphore[0],
            limit="every DMA that is started is waited for",
        )
    return results


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """jax logs what a callback raises, with its whole stack; the error says it in one line."""
    logger = logging.getLogger("jax._src.callback")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _raised(where: str, text: str) -> SimulationError:
    outside = re.search(r"Out-of-bounds .*|Range .* out of bounds .*", text)
    if outside:
        problem = f"{where}: an access outside of an array"
        limit = "only the part of an edge block that reaches past the end is legal"
        return SimulationError("KDK-PALLAS-BOUNDS", problem, value=outside[0].rstrip(" ."), limit=limit)
    again = re.search(r"Revisited block .*", text)
    if again:
        problem = f"{where}: an output block is written again later"
        limit = "grid points that write the same block follow each other"
        return SimulationError("KDK-PALLAS-REVISIT", problem, value=again[0].rstrip(" ."), limit=limit)
    lines = [line.strip() for line in text.splitlines() if re.match(r"\w*(Error|Exception): ", line.strip())]
    value = lines[-1] if lines else text[:500]
    return SimulationError("KDK-PALLAS-INTERPRETER", f"{where}: jax's TPU interpreter raised", value=value)


def _compare(where: str, i: int, first: np.ndarray, second: np.ndarray) -> None:
    with np.errstate(invalid="ignore"):
        same = (first == second) | ((first != first) & (second != second))
    if not same.all():
        at = tuple(map(int, np.argwhere(~same)[0]))
        raise SimulationError(
            "KDK-PALLAS-UNINITIALIZED",
            f"{where}: result {i} depends on memory that nothing was written to, or on the order of parallel grid points",
            value=f"{int((~same).sum())} elements of {same.size}, the first at {at}: {first[at]} where such memory holds zeros, "
            f"{second[at]} where it holds NaN",
            way_out="initialise scratch and outputs, mask what lies beyond an edge, wait for a DMA before reading",
        )
