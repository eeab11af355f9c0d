"""Rows of GPUs: what a kernel moves and uses, beside Inductor's for the same reference. Compiled, so there is no time."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kdk import tuning
from kdk.backends import LANGUAGES
from kdk.cases import Case
from kdk.dispatch import load_kernel
from kdk.indices import Indices
from kdk.registry import OPERATORS
from kdk_bench.benchmarking.measuring import Heat, cut_to, problem_of, too_large
from kdk_bench.compiling.described import arguments
from kdk_bench.expectation import Expectation
from kdk_bench.expectation import Row as Line
from kdk_bench.modelled import inductor
from kdk_bench.modelled.rows import COMPILED, FAILED, UNKNOWN, Cost, Reference, Row, own_kernel
from kdk_bench.work import least_bytes, least_flops

LEAST, UNIQUE = "least bytes", "least bytes, unique"
INTERPRETED, INTERPRETED_FLOPS = 1 << 18, 1e8  # elements of the largest tensor that a case is cut to, and operations: a few seconds
MOST_INTERPRETED = 1 << 23  # elements of one token or image that are interpreted all the same
ENOUGH = 0.5  # occupancy: what lies above it is worth less than what it takes, registers and longer rows
COLUMNS = (
    "launches",
    "bytes of\nits arrays",
    f"x {LEAST}\nunique, x least",
    "registers\nspills",
    "occupancy\nlimited by",
    "widest load\nshared",
    "tensor cores",
)


class Model:
    """A context, as every language's is."""

    def __init__(self, directory: str | None) -> None:
        self.directory = directory

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def rows(self, heat: Heat, case: Case) -> list[Row]:
        """The kernel's and that of Inductor."""
        op = OPERATORS[heat.op].op
        args = arguments(op, heat.direction, case, heat.dtype)
        function = op.function(heat.direction)
        assert function is not None
        results = function(*args)
        least = least_bytes(op, heat.direction, args, results if isinstance(results, tuple) else (results,))
        work = {"bytes": least, "flops": least_flops(op, heat.direction, heat.sizes)}
        own = self._own(heat, work)
        if own.outcome == COMPILED:
            own = _with_unique(own, self.unique(heat, case))
        return [own, self._inductor(heat, args, work)]

    def cost(self, function: Any, args: tuple[Any, ...], target: str) -> Cost:
        """No time: spills, then bytes, then occupancy as far as it hides the memory's latency, then the width of loads."""
        compiled = LANGUAGES["triton"].module("compile").compile_for(function, args, target)
        found = compiled.resources
        if compiled.outcome != "compiled":
            return Cost(why_not=compiled.reason)
        order = (found["spills"], found["array_bytes"], -min(found["occupancy"], ENOUGH), -found["widest_load_bits"])
        text = f"{found['spills']} spills, {found['registers']} registers, occupancy {found['occupancy']:.0%}"
        return Cost(order, None, f"{text}, loads of {found['widest_load_bits']} bits", COMPILED)

    def plain(self, heat: Heat, args: tuple[Any, ...]) -> Cost:
        """Unknown."""
        return Cost(why_not="without the device there are no times")

    def unique(self, heat: Heat, case: Case) -> dict[str, Any]:
        """Bytes at different addresses that the kernel touches, interpreted on the case, its first letter halved until that ends."""
        operator, sizes = OPERATORS[heat.op], cut_to(OPERATORS[heat.op].op, case, INTERPRETED, INTERPRETED_FLOPS)
        if too_large(operator.op, sizes, MOST_INTERPRETED, INTERPRETED_FLOPS):
            return {"unique_bytes": None, "unique_why_not": "the case is too large to be interpreted, with one token too"}
        lacks = LANGUAGES["triton"].module("launch").missing("cpu")
        if lacks:
            return {"unique_bytes": None, "unique_why_not": lacks}
        line = Line(heat.op, heat.direction, "triton", heat.target, heat.dtype)
        expected = Expectation(operator, line, problem_of(operator.op, case, sizes), 0)
        kernel = load_kernel(operator.op, "triton", heat.direction)
        assert kernel is not None
        given = Indices(operator.op, heat.direction).narrowed(expected.call.args)
        parameters = tuning.launch_parameters(operator.op, heat.direction, heat.target, kernel, warnings.warn)(given)
        module = LANGUAGES["triton"].module("simulate")
        touched = module.unique_bytes(kernel.configured(parameters), kernel.arguments(*given), heat.target)
        least = least_bytes(operator.op, heat.direction, expected.call.args, expected.reference)
        return {"unique_bytes": touched, "unique_least_bytes": least, "unique_sizes": sizes}

    def _own(self, heat: Heat, work: Mapping[str, Any]) -> Row:
        own = own_kernel(heat, "triton")
        if isinstance(own, Row):
            return own
        compiled = LANGUAGES["triton"].module("compile").compile_for(*own, heat.target)
        if compiled.outcome != "compiled":  # also where the compiler refuses what `supports` takes
            outcome = UNKNOWN if compiled.outcome == "unknown" else FAILED
            return Row(heat, "kdk triton", "triton", outcome, compiled.reason)
        return _row(heat, "kdk triton", "triton", compiled.resources, work, compiled.exceeded)

    def _inductor(self, heat: Heat, args: tuple[Any, ...], work: Mapping[str, Any]) -> Row:
        found, why_not = inductor.kernels(Reference(heat.op, heat.direction), args, heat.target, self.directory)
        if why_not:
            return Row(heat, "Inductor", "", UNKNOWN, why_not)
        said = [f"calls {', '.join(found['libraries'])}, whose bytes and resources are not counted"] if found["libraries"] else []
        if found["configurations"] > 1:
            said.append(f"on a device the fastest of up to {found['configurations']} configurations runs; this is the first one")
        return _row(heat, "Inductor", "", found, work, said)


def _row(heat: Heat, contender: str, implementation: str, found: Mapping[str, Any], work: Mapping[str, Any], said: Any) -> Row:
    figures = {"resources": dict(found), "array_bytes": found["array_bytes"], **work}
    ratios = {LEAST: found["array_bytes"] / work["bytes"]}
    return Row(heat, contender, implementation, COMPILED, "", None, ratios, figures, tuple(said))


def _with_unique(row: Row, found: Mapping[str, Any]) -> Row:
    if found["unique_bytes"] is None:
        return replace(row, figures={**row.figures, **found}, caveats=(*row.caveats, f"unique bytes: {found['unique_why_not']}"))
    sizes = " ".join(f"{letter}={size}" for letter, size in found["unique_sizes"].items())
    said = f"unique bytes: interpreted at {sizes}, each address once a launch"
    ratios = {**row.ratios, UNIQUE: found["unique_bytes"] / found["unique_least_bytes"]}
    return replace(row, ratios=ratios, figures={**row.figures, **found}, caveats=(*row.caveats, said))


def cells(row: Row) -> list[str]:
    """The row's figures, column by column."""
    found = row.figures["resources"]
    return [
        str(len(found["launches"])),
        f"{row.figures['array_bytes'] / 1e6:.1f} MB",
        f"{row.ratios[LEAST]:.2f}\n{_ratio(row.ratios.get(UNIQUE))}",
        f"{found['registers']}\n{found['spills']}",
        f"{found['occupancy']:.0%}\n{found['occupancy_limit']}",
        f"{found['widest_load_bits']} bits\n{found['shared_bytes']} B",
        str(found["tensor_core_instructions"] or "no"),
    ]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def summary(row: Row) -> str:
    """Of a race, for its title."""
    flops = row.figures.get("flops")
    return f", no times; at least {row.figures['bytes'] / 1e6:.1f} MB" + (f" and {flops / 1e9:.3g} GFLOP" if flops else "")
