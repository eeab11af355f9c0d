"""Rows of GPUs: what a kernel moves and uses, beside Inductor's for the same reference. Compiled, so there is no time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdk.backends import LANGUAGES
from kdk.cases import Case
from kdk.registry import OPERATORS
from kdk_bench.benchmarking.measuring import Heat
from kdk_bench.compiling.described import arguments
from kdk_bench.modelled import inductor
from kdk_bench.modelled.rows import COMPILED, FAILED, UNKNOWN, Reference, Row, own_kernel
from kdk_bench.work import least_bytes, least_flops

LEAST = "least bytes"
COLUMNS = (
    "launches", "bytes of\nits arrays", f"x {LEAST}", "registers\nspills", "occupancy\nlimited by", "widest load\nshared", "tensor cores",
)  # fmt: skip


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
        return [self._own(heat, work), self._inductor(heat, args, work)]

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


def cells(row: Row) -> list[str]:
    """The row's figures, column by column."""
    found = row.figures["resources"]
    return [
        str(len(found["launches"])),
        f"{row.figures['array_bytes'] / 1e6:.1f} MB",
        f"{row.ratios[LEAST]:.2f}",
        f"{found['registers']}\n{found['spills']}",
        f"{found['occupancy']:.0%}\n{found['occupancy_limit']}",
        f"{found['widest_load_bits']} bits\n{found['shared_bytes']} B",
        str(found["tensor_core_instructions"] or "no"),
    ]


def summary(row: Row) -> str:
    """Of a race, for its title."""
    flops = row.figures.get("flops")
    return f", no times; at least {row.figures['bytes'] / 1e6:.1f} MB" + (f" and {flops / 1e9:.3g} GFLOP" if flops else "")
