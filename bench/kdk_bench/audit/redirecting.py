"""While a model or script runs unchanged: requests for cuda go to the CPU, and each is written down with its file and line."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_map

from kdk_bench.audit.blind import LEAVES, LEFT, THREAD, launches
from kdk_bench.audit.listening import SLOW, listening
from kdk_bench.audit.places import TORCH
from kdk_bench.audit.recorder import Session

DEVICE = "a request for cuda"


def is_cuda(value: Any) -> bool:
    """Whether an argument names a cuda device: "cuda", "cuda:1", torch.device("cuda")."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


class Redirect:
    """Changes the arguments of torch functions, and replaces what torch.cuda offers to a program."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def note(self, text: str, kind: str = DEVICE) -> None:
        self.session.capture.event(kind, text, self.session.places.line())

    def __call__(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            self.note(".cuda()")
            return (lambda tensor: tensor), args[:1], {}
        if name in LEAVES and self._by_the_model(name):
            self.note(LEAVES[name], LEFT)
        flat = [*args, *kwargs.values()]
        if any(is_cuda(v) for v in flat):
            self.note(f'{name}(... "cuda")')
            if func is torch.device:  # also of a number: ("cuda", local_rank)
                return (lambda *_, **__: torch.device("cpu")), (), {}
            args, kwargs = tree_map(self._cpu, (args, kwargs))
        return func, args, kwargs

    def _by_the_model(self, name: str) -> bool:
        """Within a step, and not by torch for itself; numpy asks through torch's own method."""
        outside = name == "__array__" or not sys._getframe(3).f_code.co_filename.startswith(TORCH)
        return outside and self.session.recorder.step is not None

    def _cpu(self, value: Any) -> Any:
        return torch.device("cpu") if is_cuda(value) else value

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """torch.cuda says that there is one device and does nothing; Tensor.cuda and Module.cuda stay on the CPU."""
        self.session.functions.redirect = self
        with contextlib.ExitStack() as stack:
            for target, name, replacement in self._replacements():
                if hasattr(target, name):
                    stack.enter_context(mock.patch.object(target, name, replacement))
            stack.enter_context(launches(self.note))
            stack.enter_context(listening(lambda text: self.note(text, SLOW)))
            yield
        self.session.functions.redirect = None

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        cuda: Any = torch.cuda

        def says(name: str, value: Any) -> Callable[..., Any]:
            def answer(*args: Any, **kwargs: Any) -> Any:
                if not sys._getframe(1).f_code.co_filename.startswith(TORCH):  # torch asks for itself too
                    self.note(f"torch.cuda.{name}()")
                return value

            return answer

        answers = {
            "is_available": True, "device_count": 1, "current_device": 0, "synchronize": None, "empty_cache": None, "set_device": None,
            "get_device_name": "cpu, redirected by kdk audit", "get_device_capability": (9, 0), "memory_allocated": 0,
            "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0, "reset_peak_memory_stats": None,
            "is_bf16_supported": True, "manual_seed": None, "manual_seed_all": None, "ipc_collect": None,
        }  # fmt: skip
        found: list[tuple[Any, str, Any]] = [(cuda, name, says(name, value)) for name, value in answers.items()]
        found += [(cuda, "Event", self._stand_in("Event")), (cuda, "Stream", self._stand_in("Stream"))]
        found += [(cuda, "stream", self._nothing("stream")), (cuda, "device", self._nothing("device"))]
        found.append((cuda, "current_stream", lambda *_: self._stand_in("current_stream")()))
        found.append((nn.Module, "cuda", self._module_cuda()))
        if torch.distributed.is_available():
            found.append((torch.distributed, "init_process_group", self._process_group(torch.distributed.init_process_group)))
            parallel = nn.parallel.DistributedDataParallel
            found.append((parallel, "__init__", self._without_devices(parallel.__init__)))
        found.append((torch, "Generator", self._generator()))
        found.append((threading.Thread, "start", self._thread(threading.Thread.start)))
        found.append((nn.DataParallel, "__init__", self._one_device()))
        found.append((nn.DataParallel, "forward", lambda parallel, *inputs, **kwargs: parallel.module(*inputs, **kwargs)))
        found.append((nn.Module, "to", self._module_to(nn.Module.to)))
        found.append((torch.amp.autocast_mode.autocast, "__init__", self._autocast(torch.amp.autocast_mode.autocast.__init__)))
        return found

    def _module_cuda(self) -> Callable[..., Any]:
        def cuda(module: nn.Module, device: Any = None) -> nn.Module:
            self.note("Module.cuda()")
            return module

        return cuda

    def _stand_in(self, name: str) -> type:
        """A class, since annotations and isinstance use it as one."""
        redirect = self

        class StandIn:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                redirect.note(f"torch.cuda.{name}")

            def __enter__(self) -> StandIn:
                return self

            def __exit__(self, *error: object) -> None: ...

            def elapsed_time(self, end: Any) -> float:
                return 0.0

            def query(self) -> bool:
                return True

            def nothing(self, *args: Any) -> None: ...

            record = wait = synchronize = wait_event = wait_stream = record_event = nothing

        return StandIn

    def _nothing(self, name: str) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            self.note(f"torch.cuda.{name}")
            return contextlib.nullcontext()

        return make

    def _module_to(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def to(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if any(is_cuda(v) for v in (*args, *kwargs.values())):
                self.note('Module.to("cuda")')
                args, kwargs = tree_map(self._cpu, (args, kwargs))
            return original(module, *args, **kwargs)

        return to

    def _autocast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(mode: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
            if is_cuda(device_type):
                self.note('autocast("cuda")')
                # On cuda the default is float16, which the CPU computes slowly and in other places.
                device_type, dtype = "cpu", dtype if dtype is not torch.float16 else torch.bfloat16
            original(mode, device_type, dtype, enabled, cache_enabled)

        return init

    def _generator(self) -> type:
        """A class, since isinstance uses it as one; what it makes is torch's own, on the CPU."""
        redirect, original = self, torch.Generator

        class Generators(type):
            def __call__(cls, device: Any = "cpu") -> Any:
                if is_cuda(device):
                    redirect.note('torch.Generator("cuda")')
                return original("cpu" if is_cuda(device) else device)

            def __instancecheck__(cls, value: Any) -> bool:
                return isinstance(value, original)

        return Generators("Generator", (), {})

    def _thread(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The recorder sees the thread that it was started in."""

        def start(thread: threading.Thread) -> None:
            if self.session.recorder.step is not None and not sys._getframe(1).f_code.co_filename.startswith(TORCH):
                self.note(f"{type(thread).__name__}: the operators that it runs are not seen", THREAD)
            original(thread)

        return start

    def _one_device(self) -> Callable[..., Any]:
        """nn.DataParallel on a machine with one device: the module itself."""

        def init(parallel: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
            self.note("nn.DataParallel")
            nn.Module.__init__(parallel)
            parallel.dim, parallel.module, parallel.device_ids, parallel.output_device = dim, module, [], None

        return init

    def _without_devices(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Its module lies on the CPU here, where it takes no numbers of devices."""

        def init(parallel: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any) -> None:
            original(parallel, module, None, None, *args, **kwargs)

        return init

    def _process_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
            if backend and "nccl" in backend:
                self.note(f'init_process_group("{backend}")')
                backend = "gloo"
            return original(backend, *args, **kwargs)

        return init
