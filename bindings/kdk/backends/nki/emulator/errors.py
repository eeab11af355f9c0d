"""Every refusal of the emulator: a stable code, what was wrong, the way out, and the kernel line that caused it."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, NamedTuple, NoReturn

from kdk.errors import SimulationError


class Check(NamedTuple):
    """One kind of check. `code` is stable; `way_out` is printed with every refusal."""

    code: str
    way_out: str


CHECKS = {
    "partitions": Check("C1", "a tile on chip has at most 128 partitions; split dimension 0 into tiles"),
    "shape": Check("C2", "operands have equal partition counts and equal elements per partition; slice or reshape them"),
    "memory": Check(
        "C3",
        "move the operand to a memory this engine reaches (TensorE: SBUF to PSUM; GpSimdE: SBUF; DMA: HBM and SBUF)",
    ),
    "engine": Check("C3", "choose an engine that has this instruction, or leave engine= out"),
    "two-psum": Check("C4", "copy one of the two inputs to SBUF first"),
    "start-partition": Check("C5", "up to 32 partitions start at 0, 32, 64 or 96; up to 64 at 0 or 64; more at 0"),
    "pattern": Check(
        "C6",
        "use whole partitions and at most four free dimensions with strides that fit 16 bits; or copy the data",
    ),
    "dtype": Check("C7", "use a dtype this instruction takes, or cast with tensor_copy first"),
    "matmul": Check("C8", "K and M at most 128; N at most 512 and inside one PSUM bank before gen4; operand dtypes of one family"),
    "accumulate": Check("C9", "start a PSUM group with accumulate=False (or None on fresh PSUM) and let only matmuls write it"),
    "axis": Check("C10", "reduce the last free dimensions, ending at the last one; never dimension 0"),
    "limit": Check("C11", "stay inside the size limit of this instruction; split the operand"),
    "generation": Check("C12", "use another instruction on this generation, or another target"),
    "dma-transpose": Check("C13", "use a shape that DMA transposes, or nc_transpose"),
    "bounds": Check("C14", "address elements inside the tensor; oob_mode.skip only covers dynamic indices of a DMA"),
    "output": Check("C15", "create outputs in nl.shared_hbm, write every element and return them"),
    "uninitialised": Check("C16", "write every element before its value reaches an output, an index or a register"),
    "loop": Check("C17", "carry state through SBUF or HBM; use loop registers only as scalar_offset or loop bound"),
    "capacity": Check("C18", "use smaller or fewer tiles that are live at the same time, or addresses that do not overlap"),
    "operator": Check("C19", "no engine executes this; use an operator of the instruction's table"),
    "domain": Check("C20", "keep the input of this activation inside its valid range"),
    "lnc": Check("C21", "both cores run the same instructions; put core_barrier between accesses of the two cores"),
    "accumulator": Check("C22", "start the accumulator with reset_reduce (or load_reduce) before reading or extending it"),
    "lint": Check("C23", "legal, but slow on the hardware"),
    "removed": Check("C24", "this is not part of NKI 0.6/0.7; see the migration guide"),
    "argument": Check("C25", "see the signature of this call"),
    "parser": Check("C26", "rewrite it in the Python subset of the parser front end, or use the tracer (NKI 0.7)"),
}


class NkiValidationError(SimulationError):
    """A rule of the hardware or of the API is violated. `code` (C1 ...) and `check` are stable."""

    def __init__(self, problem: str, check: str = "", site: str = "") -> None:
        rule = CHECKS.get(check, Check("NKI", ""))
        super().__init__(rule.code, f"{check}: {problem}" if check else problem, way_out=rule.way_out)
        self.check, self.site = check, site
        if site:
            self.args = (f"{self.args[0]}. At {site}",)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem.removeprefix(f"{self.check}: "), self.check, self.site)


_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def call_site() -> str:
    """The nearest line outside the emulator, as `file.py:12`."""
    frame = sys._getframe(1)
    while frame is not None and _kernel_file(frame.f_code.co_filename) is None:
        frame = frame.f_back  # type: ignore[assignment]
    return f"{_kernel_file(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else "unknown line"


@functools.cache
def _kernel_file(path: str) -> str | None:
    """The name of a file outside the emulator; None inside it."""
    return None if path.startswith(_PACKAGE) else os.path.basename(path)


def build_error(check: str, text: str, site: str | None = None) -> NkiValidationError:
    return NkiValidationError(text, check, site or call_site())


def refuse(check: str, text: str) -> NoReturn:
    raise build_error(check, text)


def need(condition: object, check: str, text: str) -> None:
    """Refuse unless `condition` holds. Build costly texts at the call only when needed: see callers in hot paths."""
    if not condition:
        raise build_error(check, text)
