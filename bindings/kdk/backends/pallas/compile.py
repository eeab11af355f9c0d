"""Pallas kernels compiled ahead of time for a real TPU, on any host: Mosaic and XLA's TPU back end through libtpu.

libtpu aborts the process on some programs. `compile_for` takes and returns what can be pickled, so that a caller who must
survive that runs it in a worker process.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kdk.backends import Compiled, one_line
from kdk.backends.pallas import LANGUAGE, MIB, SCOPED_VMEM
from kdk.backends.pallas.environment import on_chip, prepare_libtpu

TOPOLOGIES = {"v5e": "v5e:1x1", "v5p": "v5p:2x2x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}  # the smallest there are

BRIEF = "scoped VMEM and its limit in MiB"


def brief(resources: Mapping[str, Any]) -> str:
    """The resources of `compile_for` in a few characters."""
    if not resources:
        return "compiled"
    return f"{resources['scoped_vmem_bytes'] / MIB:.1f}/{resources['scoped_vmem_limit'] / MIB:.0f} MiB"


@functools.cache
def missing() -> str | None:
    """Why nothing can be compiled here, and how to get what lacks."""
    for package in ("jax", "libtpu"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: pip install 'torch-kdk[tpu]' (libtpu exists for Linux on x86-64)"
    return None


@functools.cache
def device(target: str) -> Any:
    """A device of a chip that is not here, to compile for."""
    prepare_libtpu()
    from jax.experimental import topologies

    return topologies.get_topology_desc(topology_name=TOPOLOGIES[target], platform="tpu").devices[0]


def traced(function: Callable[..., Any], args: tuple[Any, ...], target: str) -> Any:
    """The kernel's function as a jax program for the chip (`.lower().compile()` makes an executable of it).

    args: what the launcher gets. Of tensors (torch's or jax's) only shapes and dtypes are read, so meta tensors and
    jax.ShapeDtypeStruct do; the rest is static.
    """
    import jax

    sharding = jax.sharding.SingleDeviceSharding(device(target))
    static = tuple(i for i, a in enumerate(args) if not _is_array(a) and a is not None)
    described = [
        jax.ShapeDtypeStruct(tuple(a.shape), str(a.dtype).removeprefix("torch."), sharding=sharding) if _is_array(a) else a
        for a in args
    ]
    with on_chip(target):
        return jax.jit(function, static_argnums=static).trace(*described)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def loaded(stablehlo: str, target: str) -> Any:
    """What XLA's TPU back end makes of a StableHLO module, as `traced(...).lower()` gives it."""
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jaxlib.mlir import ir

    where = device(target)
    with mlir.make_ir_context():
        return where.client.compile(ir.Module.parse(stablehlo), _jax.DeviceList((where,)), compiler.get_compile_options(1, 1))


def text_of(program: Any) -> str:
    """The optimised program of `loaded` as text. XLA cannot read back some of the programs that it compiles: it raises then."""
    modules = program.get_hlo_modules() if hasattr(program, "get_hlo_modules") else program.hlo_modules()
    return str(modules[0].to_string())


def compile_for(function: Callable[..., Any], args: tuple[Any, ...], target: str) -> Compiled:
    """Compile `function(*args)` for a chip: exactly what runs there, nothing interpreted.

    Resources: bytes of scoped VMEM, used and allowed, of the kernel that comes closest to its limit (of a program without a
    kernel: 0 and the chip's default). XLA cannot read back some of the programs that it compiles: then there are none, `text` is
    empty, and the reason says so.
    """
    for a in args:
        if isinstance(a, Tensor) and a.dtype in (torch.float64, torch.int64):  # jax would take it for a 32-bit type
            name = str(a.dtype).removeprefix("torch.")
            return Compiled(target, "refused", f"{name}: {LANGUAGE.no_dtype[name]}")
    try:
        program = traced(function, args, target)
    except NotImplementedError as error:
        return Compiled(target, "refused", readable(error))
    except Exception as error:
        return Compiled(target, "failed", f"{type(error).__name__}: {readable(error)}")
    try:
        executable = program.lower().compile()
    except Exception as error:  # a ValueError of Pallas, an MLIR error of Mosaic, an XLA runtime error: all are refusals
        return Compiled(target, "refused", readable(error))
    try:
        text = executable.as_text()
    except Exception as error:
        return Compiled(target, "compiled", f"its optimised program cannot be read back: {readable(error)}")
    used, limit = scoped_vmem(text, target)
    over = (f"{used} bytes of scoped VMEM, limit {limit}",) if used > limit else ()
    return Compiled(target, "compiled", "", {"scoped_vmem_bytes": used, "scoped_vmem_limit": limit}, over, text=text)


def scoped_vmem(text: str, target: str) -> tuple[int, int]:
    """(used, limit) of the kernel nearest to its limit, in the optimised HLO of a program."""
    worst = (0, SCOPED_VMEM[target])
    for line in text.splitlines():
        if 'custom_call_target="tpu_custom_call"' not in line:
            continue
        used = _vmem(line, "used_scoped_memory_configs") or 0
        limit = _vmem(line, "scoped_memory_configs") or SCOPED_VMEM[target]
        worst = max(worst, (used, limit), key=lambda pair: pair[0] / pair[1])
    return worst


def _vmem(line: str, field: str) -> int | None:
    found = re.search(rf'"{field}":\[([^]]*)\]', line)
    sizes = re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', found[1]) if found else []
    return max(map(int, sizes), default=None)


def readable(error: Exception) -> str:
    """A compiler's message in one line: what, which operation, which line of the kernel; without dumps and advice."""
    text = str(error)
    vmem = re.search(r"Scoped allocation with size \S+ and limit \S+ exceeded scoped vmem limit by [\d.]+\w?", text)
    if vmem:
        return vmem[0]
    _, mosaic, rest = text.partition("Mosaic failed to compile TPU kernel")
    if not mosaic:
        return one_line(re.split(r"\n\n|\nSee |Please file an issue", text)[0])
    words = [f"Mosaic: {one_line(re.sub(r'^.*?HLO name `[^`]*`: |^: ', '', rest.partition(chr(10))[0]))}"]
    operation = re.search(r'The MLIR operation involved:\s*(?:%\S+ = )?"?([\w.]+)"?.*?(-> .*)?$', rest, re.MULTILINE)
    if operation:
        words.append(f"operation {operation[1]} {operation[2] or ''}".rstrip())
    place = re.search(r'"[^"]*?([^"/\\]+\.py)":(\d+)', rest)
    if place:
        words.append(f"{place[1]}, line {place[2]}")
    return one_line("; ".join(words))
