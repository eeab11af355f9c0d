"""Modes that write down every operator a real eager run executes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from kdk_bench.audit import blind, counting, expanding
from kdk_bench.audit.listening import SLOW
from kdk_bench.audit.places import Places, package, short
from kdk_bench.audit.trace import Call, Capture, Ref, Step

KEEP = 2 << 30  # bytes of the first step's tensors that are kept, to confirm findings on them


class Recorder(TorchDispatchMode):
    """Below autograd: forward, backward and the optimiser's operators, composites already taken apart."""

    def __init__(self, capture: Capture, places: Places, functions: Functions) -> None:
        super().__init__()
        self.capture, self.places, self.functions = capture, places, functions
        self.numbers: Any = WeakIdKeyDictionary()
        self.next = 0
        self.step: Step | None = None
        self.live: counting.Live | None = None
        self.keep = False
        self.kept = 0
        self.optimising = False
        self.unwritten = blind.Unwritten()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func._can_decompose():
            # Without autograd's keys a composite arrives whole; elsewhere it has come apart above.
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if self.step is None:
            return func(*args, **kwargs)
        described = tree_map(self._ref, (args, kwargs))
        start = time.perf_counter()
        out = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        self._record(func, args, kwargs, described, out, seconds)
        return out

    def _ref(self, value: Any) -> Any:
        return Ref(self.number(value)) if isinstance(value, torch.Tensor) else value

    def number(self, tensor: torch.Tensor, new: bool = False) -> int:
        """The number of a tensor's value; `new` after it was changed in place."""
        if new or tensor not in self.numbers:
            self.numbers[tensor] = self.next
            self.capture.metas[self.next] = counting.meta(tensor)
            if self.keep:
                # torch counts a change only after this call: what was changed is kept as a copy, which nothing changes.
                self._keep(tensor.detach().clone() if new else tensor, self.next)
            self.next += 1
        return int(self.numbers[tensor])

    def _keep(self, tensor: torch.Tensor, number: int) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.kept + size <= KEEP:
            self.kept += size
            self.capture.tensors[number] = (tensor, tensor._version if not tensor.is_inference() else 0)

    def before_update(self, optimizer: Any) -> None:
        """The weights as the forward saw them, before they change in place."""
        with _disable_current_modes():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                number = self.numbers.get(parameter)
                if self.keep and number in self.capture.tensors:
                    self.capture.tensors[number] = (parameter.detach().clone(), 0)

    def _record(self, func: Any, args: Any, kwargs: Any, described: Any, out: Any, seconds: float) -> None:
        assert self.step is not None
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        outputs = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
        changed = {id(t) for t in inputs} & {id(t) for t in outputs}
        metas = tuple(counting.meta(t) for t in inputs)
        numbers = tuple(self.number(t, new=id(t) in changed) for t in outputs)
        module, line, backward = self.places.here()
        unwritten = self.unwritten.see(func, args, kwargs, inputs, outputs, line)
        if unwritten is not None:
            self.capture.event(blind.UNWRITTEN, *unwritten)
        view = counting.is_view(func)
        phase = "optimiser" if self.optimising else "backward" if backward else "forward"
        self.step.calls.append(
            Call(
                number=len(self.step.calls),
                op=func._schema.name,
                overload=func._overloadname,
                phase=phase,
                args=described[0],
                kwargs=described[1],
                outputs=numbers,
                module=module,
                line=line,
                function="" if backward else self.functions.current,
                seconds=seconds,
                bytes=0 if view else counting.moved([*inputs, *outputs]),
                flops=0 if view else counting.flops(func, args, kwargs, out, outputs),
                view=view,
                metas=metas,
                children=expanding.children(func, args, kwargs),
            )
        )
        if self.live is not None:
            self.live.add(outputs)


class Functions(TorchFunctionMode):
    """Names the torch function that the model calls, and lets `redirect` change the arguments of requests for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.current = ""
        self.redirect: Callable[[Any, Any, Any], tuple[Any, Any, Any]] | None = None
        self.names: dict[Any, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.redirect is not None:
            func, args, kwargs = self.redirect(func, args, kwargs)
        try:
            name = self.names[func]
        except (KeyError, TypeError):
            name = _name(func)
            self.names[func] = name
        before, self.current = self.current, name
        try:
            return func(*args, **kwargs)
        finally:
            self.current = before


def _name(func: Any) -> str:
    try:
        return (resolve_name(func) or getattr(func, "__name__", "")) if callable(func) else ""
    except (AttributeError, TypeError):
        return ""


class Session:
    """The modes together, and the steps: `with session.running(): session.begin(...); ...; session.end()`."""

    def __init__(self, how: str) -> None:
        self.capture = Capture(how)
        self.places = Places()
        self.functions = Functions()
        self.stepped: Callable[[Any], None] | None = None
        self.recorder = Recorder(self.capture, self.places, self.functions)
        self.unwatch: Callable[[], None] = lambda: None

    @contextmanager
    def running(self) -> Iterator[Session]:
        with ExitStack() as stack:
            stack.enter_context(self.places.following())
            stack.enter_context(self._optimisers())
            stack.enter_context(self.functions)
            stack.enter_context(self.recorder)
            stack.callback(lambda: self.unwatch())
            yield self
        self.capture.modules = self.places.classes
        for code, count in self.places.slow.items():
            self.capture.event(SLOW, f"{code.co_name} of {package(code)}", f"{short(code.co_filename)}:{code.co_firstlineno}", count)
        self.places.slow.clear()

    @contextmanager
    def _optimisers(self) -> Iterator[None]:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        def begin(optimizer: Any, *_: Any) -> None:
            self.recorder.optimising = True
            self.recorder.before_update(optimizer)

        def end(optimizer: Any, *_: Any) -> None:
            self.recorder.optimising = False
            self._states(optimizer)
            if self.stepped is not None:
                self.stepped(optimizer)

        handles = [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _states(self, optimizer: Any) -> None:
        tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        self.capture.memory["optimiser"] = counting.moved(tensors)

    def begin(self, inputs: Any, keep: bool, already: Any = ()) -> Step:
        """Start a step. keep: hold on to its tensors; else watch the bytes alive, without those of `already`."""
        tensors = [t for t in tree_flatten(inputs)[0] if isinstance(t, torch.Tensor)]
        step = Step(tuple(counting.meta(t) for t in tensors))
        self.capture.steps.append(step)
        self.recorder.step, self.recorder.keep = step, keep
        self.recorder.live = None if keep else counting.Live(already)
        for tensor in tensors:
            self.recorder.number(tensor)
        if self.functions.redirect is not None:  # somebody's program, and not a formula that is looked for
            self.unwatch = blind.watch(lambda text, kind: self.capture.event(kind, text, self.places.line()))
        step.seconds = -time.perf_counter()
        return step

    def end(self) -> None:
        """End the step that runs."""
        step, live = self.recorder.step, self.recorder.live
        if step is None:
            return
        step.seconds += time.perf_counter()
        self.unwatch()
        if live is not None:
            live.sweep()
            step.live_peak = live.peak
        self.recorder.step, self.recorder.live, self.recorder.keep = None, None, False
