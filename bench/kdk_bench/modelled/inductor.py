"""What Inductor makes of a torch function for a GPU that is not here: its Triton kernels, compiled, and the arrays they are given.

In a process of its own: torch is told, for good, that it has this GPU. Inductor generates its program, which then runs on tensors
without data, and whatever it launches is compiled instead.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kdk.backends import one_line
from kdk_bench.work import bytes_of

LIMIT = 600.0  # seconds


def kernels(function: Callable[..., Any], args: Sequence[Any], target: str, directory: str | None) -> tuple[dict[str, Any], str]:
    """(resources as `compile_for` of kdk's Triton language gives them, why there are none).

    function: of a module. args: tensors on the meta device, the rest as it is.
    """
    request = pickle.dumps((pickle.dumps((function, tuple(args))), target, directory))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else it starts processes of its own
    command = [sys.executable, "-m", "kdk_bench.modelled.inductor"]
    try:
        done = subprocess.run(command, input=request, capture_output=True, env=environment, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return {}, f"Inductor did not end within {LIMIT:.0f} s"
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        return {}, f"Inductor cannot compile it here: {one_line(words[-1])}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found, "" if found["launches"] else "Inductor launches no kernel of its own for it"


def _pretend(target: str) -> None:
    """From here on torch has this GPU, as far as Inductor asks."""
    from torch._dynamo import device_interface
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    from kdk.backends.triton.absent import CompilingDriver, properties
    from kdk.backends.triton.chips import CHIPS
    from kdk.backends.triton.interpreter import gpu_target

    chip, amd = CHIPS[target], not target.startswith("sm_")
    import triton

    triton_heuristics.StaticTritonCompileResult.can_statically_launch = staticmethod(lambda *_: None)  # type: ignore[assignment]
    triton_helpers.set_driver_to_gpu = lambda: None  # it would load the maker's library
    triton.runtime.driver.set_active(CompilingDriver(gpu_target(target), chip))
    answers: dict[str, Any] = {
        "get_device_properties": lambda *_: properties(chip),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "synchronize": lambda *_: None,
        "is_bf16_supported": lambda *_, **__: True,
    }
    for name, answer in {**answers, "get_device_capability": lambda *_: chip.capability, "_lazy_init": lambda: None}.items():
        setattr(torch.cuda, name, answer)
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch.version.cuda, torch.version.hip = (None, "6.4") if amd else ("12.8", None)  # type: ignore[assignment]
    major, minor = chip.capability
    answers |= {
        "get_compute_capability": lambda *_: target if amd else 10 * major + minor,
        "is_triton_capable": lambda *_: True,
        "raise_if_triton_unavailable": lambda *_: None,
    }
    interface = device_interface.CudaInterface
    for name, answer in answers.items():
        setattr(interface, name, staticmethod(answer))
    interface.Worker.get_device_properties = staticmethod(lambda *_: properties(chip))  # type: ignore[assignment]
    interface.Worker.current_device = staticmethod(lambda: 0)  # type: ignore[assignment]
    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, interface)


def _generated(function: Callable[..., Any], args: Sequence[Any]) -> tuple[str, list[Tensor]]:
    """(the source of Inductor's program, its inputs on the meta device)."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    tensors = [a for a in args if isinstance(a, Tensor)]

    def run(*given: Tensor) -> Any:
        values = iter(given)
        results = function(*[next(values) if isinstance(a, Tensor) else a for a in args])
        return [r for r in (results if isinstance(results, tuple) else (results,)) if r is not None]

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        fakes = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in tensors]
        graph = make_fx(run, decomposition_table=select_decomp_table())(*fakes)
        graph.graph.eliminate_dead_code()
    lowering = GraphLowering(graph, shape_env=mode.shape_env)
    with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        lowering.run(*fakes)
        code, _ = lowering.codegen()
    return code if isinstance(code, str) else code.value, tensors


class _Launches:
    """Stands for Inductor's compiler in the generated program: a kernel that is run is compiled, in the first configuration that
    Inductor would try, and noted."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.found: list[dict[str, Any]] = []
        self.array_bytes = 0
        self.choices = 1

    def triton(self, name: str, source: str, **_: Any) -> Any:
        from torch._inductor.codecache import PyCodeCache

        kernel = getattr(PyCodeCache.load(source), name)
        return SimpleNamespace(run=lambda *args, **_: self._launch(kernel, args))

    def wait(self, scope: Any) -> None: ...

    def _launch(self, kernel: Any, args: Sequence[Any]) -> None:
        from kdk.backends.triton.resources import resources

        arrays = {id(a): a for a in args if isinstance(a, Tensor)}
        self.array_bytes += sum(map(bytes_of, arrays.values()))
        self.choices = max(self.choices, len(kernel.configs))
        compiled = kernel._precompile_config(kernel.configs[0]).kernel
        found = resources(compiled, self.target, (0, 0, 0))
        del found["grid"]
        self.found.append(found)


def _run(source: str, inputs: list[Tensor], launches: _Launches) -> list[str]:
    """Run the generated program on tensors without data; the names of other libraries' kernels that it calls."""
    module = ModuleType("generated")
    module.__dict__["launches"] = launches
    source = source.replace("async_compile = AsyncCompile()", "async_compile = launches")
    exec(compile(source, "generated", "exec"), module.__dict__)
    empty = {"empty_strided_cuda": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="meta")}
    module.__dict__.update(empty, get_raw_stream=lambda index: 0, assert_size_stride=lambda *_: None, assert_alignment=lambda *_: None)

    class Guard:
        def __init__(self, index: int) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *exc: object) -> None: ...

    torch.cuda._DeviceGuard = Guard  # type: ignore[assignment,misc]
    torch.cuda.set_device = lambda *_: None
    call = module.__dict__["call"]
    call(list(inputs))
    return sorted(set(re.findall(r"extern_kernels\.(\w+)\(", source)))


def main() -> None:
    """In the process of `kernels`."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer
    given, target, directory = pickle.load(sys.stdin.buffer)
    import kdk.ops  # noqa: F401
    from kdk.registry import load_directory

    if directory:
        load_directory(directory)
    function, args = pickle.loads(given)
    _pretend(target)
    source, inputs = _generated(function, args)
    launches = _Launches(target)
    libraries = _run(source, inputs, launches)
    found: dict[str, Any] = {"launches": launches.found}
    if launches.found:
        found = importlib.import_module("kdk.backends.triton.compile").summary(launches.found)
    found |= {"array_bytes": launches.array_bytes, "configurations": launches.choices, "libraries": libraries}
    json.dump(found, answer)
    answer.flush()


if __name__ == "__main__":
    main()
