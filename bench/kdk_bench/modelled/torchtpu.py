"""What TorchTPU makes of a torch function: its StableHLO, on a host without a TPU, kdk's kernels included.

TorchTPU renames a torch device for the whole process, so this happens in one of its own: `lower`. There, it traces without a TPU up
to the call of a custom kernel, whose lowering asks for one. So the kernels' calls are recorded, each with a marker in the program
(an optimization barrier over its operands and results), and the modules that TorchTPU made of the kernels are put in the markers'
places afterwards.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kdk.backends import one_line
from kdk.errors import UsageError
from kdk_bench.modelled import scans

BESIDE = ".venv-tpu"  # where `make test-tpu` puts it: torch would load it at every import if it lay in the environment
LIMIT = 600.0  # seconds


def where() -> str | None:
    """The folder that holds the package torch_tpu: "" if it is in the environment, None if it is nowhere."""
    if importlib.util.find_spec("torch_tpu") is not None:
        return ""
    for root in (Path(sys.prefix).parent, Path(__file__).resolve().parents[3]):
        if (root / BESIDE / "torch_tpu").is_dir():
            return str(root / BESIDE)
    return None


def missing() -> str | None:
    """Why no torch function can be lowered here, and how to get what lacks."""
    if where() is None:
        return "torch_tpu is not installed: `make .venv-tpu/.installed` puts it beside the environment"
    return None


def lower(function: Callable[..., Any], args: Sequence[Any], target: str, directory: str | None = None) -> tuple[str, str]:
    """(StableHLO of `function(*args)`, why there is none). function: of a module; the process that lowers it imports it.

    args: of tensors only shapes and dtypes are read. directory: a bare folder with operators that the function uses.
    """
    lacks = missing()
    if lacks:
        return "", lacks
    try:
        request = pickle.dumps((pickle.dumps((function, tuple(args))), target, directory))
    except (pickle.PicklingError, AttributeError) as error:
        way_out = "define it in a module, by name"
        raise UsageError("KDK-FUNCTION", "a function that no other process can import", value=one_line(error), way_out=way_out) from None
    path = [p for p in (where(), *sys.path) if p]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "kdk_bench.modelled.torchtpu"]
    try:
        done = subprocess.run(command, input=request, capture_output=True, env=environment, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return "", f"TorchTPU did not lower it within {LIMIT:.0f} s"
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        return "", f"TorchTPU cannot lower it: {one_line(words[-1])}"
    return done.stdout.decode(), ""


class Recorder:
    """Stands in for TorchTPU's registry of custom kernels."""

    def __init__(self) -> None:
        self.modules: dict[tuple[str, str], bytes] = {}
        self.calls: list[tuple[tuple[str, str], int]] = []

    def lookup_custom_kernel(self, name: str, fingerprint: str) -> bool:
        return (name, fingerprint) in self.modules

    def register_custom_kernel(self, name: str, fingerprint: str, serialized_mlir_module: bytes) -> None:
        self.modules[name, fingerprint] = serialized_mlir_module

    def call_custom_kernel(
        self, name: str, fingerprint: str, inputs: Any, output_shapes: Any, donate_argnums: Any, device_assignment: Any
    ) -> list[torch.Tensor]:
        results = [torch.zeros(o.shape, dtype=o.dtype, device="tpu") for o in output_shapes]
        marked = torch.ops.tpu._optimization_barrier([*inputs, *results])
        self.calls.append(((name, fingerprint), len(inputs)))
        return list(marked[len(inputs) :])


@contextmanager
def as_if_there_were(chip: str) -> Iterator[None]:
    """Inside, kdk takes its Pallas kernels on "tpu" tensors, for this chip."""
    from kdk.backends.pallas import launch

    with mock.patch.object(launch, "missing", lambda where: None), mock.patch.object(launch, "target", lambda device: chip):
        yield


UNSTABLE = ", is_stable = false)"
"""Of `chlo.top_k`: that ties may come in any order. jaxlib's parser does not know it, and takes a top_k without it."""


def stablehlo(program: Callable[..., Any], inputs: Sequence[Any]) -> str:
    """The program as TorchTPU lowers it, in a process where it is loaded. Meta tensors among the inputs become its tensors."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir
    from torch_tpu._internal import execution_mode
    from torch_tpu._internal.compile import tpu_torch_compile
    from torch_tpu._internal.pallas import pallas

    recorder = Recorder()
    compiling = execution_mode.EagerMode._INTERNAL_COMPILE_FX_GRAPH
    with mock.patch.object(pallas, "tpu_torch_pallas", recorder), execution_mode.set_eager_mode(compiling):
        args = [tpu_torch_compile.placeholder(list(a.shape), a.dtype, False) if isinstance(a, torch.Tensor) else a for a in inputs]
        results = program(*args)
        results = [t for t in (results if isinstance(results, tuple | list) else (results,)) if t is not None and t.numel()]
        given = [a for a in args if isinstance(a, torch.Tensor)]
        text = tpu_torch_compile.serialize_mlir_text(tpu_torch_compile.build_mlir(results, given), enable_debug_info=False)
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text.replace(UNSTABLE, ")"))
        main = next(f for f in module.body.operations if f.name.value == "main")
        markers = [o for o in main.regions[0].blocks[0].operations if o.name == "stablehlo.optimization_barrier"]
        for i, (marker, (key, inputs_of_call)) in enumerate(zip(markers, recorder.calls, strict=True)):
            _replace(module, marker, recorder.modules[key], inputs_of_call, f"kernel_{i}")
        scans.expand(module)
        module.operation.verify()
        return str(module)


def _replace(module: Any, marker: Any, serialized: bytes, inputs: int, name: str) -> None:
    """Put a call of a kernel's module in a marker's place."""
    from jax._src.lib import _jax
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import func

    kernel = ir.Module.parse(str(_jax.mlir.deserialize_portable_artifact(serialized)))
    functions = list(kernel.body.operations)
    for function in functions:  # all of them before one leaves: they call each other
        old = function.name.value
        new = name if old == "main" else f"{name}_{old}"
        ir.SymbolTable.replace_all_symbol_uses(old, new, kernel.operation)
        ir.SymbolTable.set_symbol_name(function.operation, new)
        ir.SymbolTable.set_visibility(function.operation, "private")
    for function in functions:
        module.body.append(function.operation.detach_from_parent())
    operands, results = list(marker.operands)[:inputs], list(marker.results)[inputs:]
    with ir.InsertionPoint(marker):
        call = func.CallOp([r.type for r in results], ir.FlatSymbolRefAttr.get(name), operands)
    for result, operand in zip(marker.results, operands):
        result.replace_all_uses_with(operand)
    for result, value in zip(results, call.results):
        result.replace_all_uses_with(value)
    marker.operation.erase()


def main() -> None:
    """In the process of `lower`."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TorchTPU prints is no answer
    given, target, directory = pickle.load(sys.stdin.buffer)
    from kdk.backends.pallas.environment import prepare_jax

    prepare_jax()
    from torch_tpu import _loader

    _loader._init_device("tpu")
    import kdk.ops  # noqa: F401
    from kdk.registry import load_directory

    if directory:
        load_directory(directory)
    function, args = pickle.loads(given)
    with as_if_there_were(target):
        answer.write(stablehlo(function, args))
    answer.flush()


if __name__ == "__main__":
    main()
