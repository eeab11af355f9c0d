"""A torch program on device "tpu" -> StableHLO -> an executable for a TPU that is not here.

TorchTPU traces without a TPU up to the call of a custom kernel, whose lowering asks for one. So the kernels' calls are
recorded, each with a marker in the program (an optimization barrier over its operands and results), and the modules that
TorchTPU made of the kernels are put in the markers' places afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func
from torch_tpu._internal import execution_mode
from torch_tpu._internal.compile import tpu_torch_compile
from torch_tpu._internal.pallas import pallas

from kdk.backends.pallas.compile import device


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


def stablehlo(program: Callable[..., Any], inputs: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """The program as TorchTPU lowers it. Meta tensors among the inputs become tensors on the device."""
    recorder = Recorder()
    monkeypatch.setattr(pallas, "tpu_torch_pallas", recorder)
    with execution_mode.set_eager_mode(execution_mode.EagerMode._INTERNAL_COMPILE_FX_GRAPH):
        args = [tpu_torch_compile.placeholder(list(a.shape), a.dtype, False) if isinstance(a, torch.Tensor) else a for a in inputs]
        results = program(*args)
        results = [t for t in (results if isinstance(results, tuple) else (results,)) if t is not None and t.numel()]
        given = [a for a in args if isinstance(a, torch.Tensor)]
        text = tpu_torch_compile.serialize_mlir_text(tpu_torch_compile.build_mlir(results, given), enable_debug_info=False)
    assert recorder.calls, "no kernel was called"
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        main = next(f for f in module.body.operations if f.name.value == "main")
        markers = [o for o in main.regions[0].blocks[0].operations if o.name == "stablehlo.optimization_barrier"]
        for i, (marker, (key, inputs_of_call)) in enumerate(zip(markers, recorder.calls, strict=True)):
            _replace(module, marker, recorder.modules[key], inputs_of_call, f"kernel_{i}")
        module.operation.verify()
        return str(module)


def _replace(module: ir.Module, marker: Any, serialized: bytes, inputs: int, name: str) -> None:
    """Put a call of a kernel's module in a marker's place."""
    kernel = ir.Module.parse(str(_jax.mlir.deserialize_portable_artifact(serialized)))
    for function in list(kernel.body.operations):
        old = function.name.value
        new = name if old == "main" else f"{name}_{old}"
        ir.SymbolTable.replace_all_symbol_uses(old, new, kernel.operation)
        ir.SymbolTable.set_symbol_name(function.operation, new)
        ir.SymbolTable.set_visibility(function.operation, "private")
        module.body.append(function.operation.detach_from_parent())
    operands, results = list(marker.operands)[:inputs], list(marker.results)[inputs:]
    with ir.InsertionPoint(marker):
        call = func.CallOp([r.type for r in results], ir.FlatSymbolRefAttr.get(name), operands)
    for result, operand in zip(marker.results, operands):
        result.replace_all_uses_with(operand)
    for result, value in zip(results, call.results):
        result.replace_all_uses_with(value)
    marker.operation.erase()


def compiled(text: str, target: str) -> Any:
    """An executable for a chip."""
    where = device(target)
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        return where.client.compile(module, _jax.DeviceList((where,)), compiler.get_compile_options(1, 1))
