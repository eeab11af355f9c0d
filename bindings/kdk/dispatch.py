"""The body of an operator: which implementation runs a call, on tensors that are real. One per operator and direction."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _is_alias_of  # type: ignore[attr-defined]
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy  # type: ignore[import-not-found]

from kdk.backends import LANGUAGES, Language
from kdk.checking import checking, tensor_rows
from kdk.errors import FallbackWarning, RefusedError
from kdk.op import Op
from kdk.platforms import platform
from kdk.recording import Key, Tally, tally
from kdk.selection import Choice, parse

Refuse = Callable[[tuple[Any, ...]], str | None]  # the reason why an implementation does not take these arguments
FILES = {"torch": "algorithm"} | {name: name for name in LANGUAGES}


_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """`function`, which dynamo leaves alone, and all that it calls.

    Where a compiled function has a graph break, torch calls operators with dynamo still looking at every new Python frame: it
    would compile those of the dispatch, and of a kernel's launch. What torch._dynamo.disable does costs a microsecond a call
    and its import seconds; this marks the code, once.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def _no_function(*args: Any) -> Any:
    raise AssertionError("a candidate that refuses everything was called")


class Candidate:
    """One implementation of one direction of an operator, for one device and target."""

    def __init__(self, op: Op, direction: str, implementation: str, how: str, target: str) -> None:
        self.key = Key(op.name, direction, implementation, how, target, "")
        self.function: Callable[..., Any] = _no_function
        self.refuse: Refuse | None = None
        self.kernel = implementation in LANGUAGES

    @functools.cached_property
    def tally(self) -> Tally:
        return tally(self.key)

    def because(self, reason: str) -> Candidate:
        """The same candidate, counted with a reason for taking it."""
        other = copy.copy(self)
        other.__dict__.pop("tally", None)
        other.key = self.key._replace(reason=reason)
        return other

    def refused(self, reason: str, strict: bool) -> None:
        """Count the refusal, warn the first time; raise when strict."""
        key = self.key
        if strict:
            raise RefusedError(
                "KDK-REFUSED",
                f"{key.op}.{key.direction}: {key.implementation} refused",
                value=reason,
                way_out="leave kdk.strict() (or KDK_STRICT=1) and the next implementation runs, recorded with this reason",
            )
        if tally(key._replace(how="refused", reason=reason)).add() == 1:
            text = f"{key.op}.{key.direction}: {key.implementation} refused, another implementation runs: {reason}"
            warnings.warn(text, FallbackWarning, stacklevel=3)


def kernel_file(op: Op, implementation: str, direction: str) -> str | None:
    """The import name of the file that holds a kernel, or None when the operator has none."""
    name = f"{op.package}.{FILES[implementation]}{'' if direction == 'forward' else '_backward'}"
    return name if importlib.util.find_spec(name) else None


def contiguous_and_new(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with results that are contiguous and share no memory with an argument or with each other.

    What every implementation owes and the fake promises.
    """

    def fix(t: Tensor | None, others: Sequence[Any]) -> Tensor | None:
        if t is None:
            return None
        for other in others:  # not t._is_view(), which knows no views in inference mode
            if isinstance(other, Tensor) and _is_alias_of(t, other):
                return t.clone(memory_format=torch.contiguous_format)
        return t.contiguous()

    def run(*args: Any) -> Any:
        result = function(*args)
        if isinstance(result, Tensor):
            return fix(result, args)
        fixed: list[Tensor | None] = []
        for t in result:
            fixed.append(fix(t, (*args, *fixed)))
        return tuple(fixed)

    return run


def no_nones(result: Any, args: tuple[Any, ...]) -> Any:
    """A schema's results are tensors: what a backward did not compute becomes an empty one."""
    if isinstance(result, Tensor):
        return result
    for t in result:
        if t is None:
            like = first_tensor(args)
            return tuple([like.new_empty(0) if t is None else t for t in result])
    return result


def first_tensor(args: tuple[Any, ...]) -> Tensor:
    for a in args:
        if isinstance(a, Tensor):
            return a
    raise AssertionError("an operator has a tensor argument")


def _reference(op: Op, direction: str) -> Candidate:
    candidate = Candidate(op, direction, "reference", "device", "")
    function = op.function(direction)
    assert function is not None
    candidate.function = contiguous_and_new(function)
    return candidate


def _kernel(op: Op, direction: str, language: Language, where: str, choice: Choice, device: torch.device) -> Candidate:
    """A language's kernel: on its own platforms on the device, on a CPU's tensors in its simulator, refused elsewhere."""
    native = where in language.platforms
    target = "" if native else choice.target or language.targets[0]
    candidate = Candidate(op, direction, language.name, "device" if native else "simulated", target)
    launch = language.module("launch")
    static = None if native or where in language.simulated else f"it does not run on {where}"
    static = static or launch.missing(where)
    file = kernel_file(op, language.name, direction)
    if file is None:
        static = f"{op.name} has no {language.name} kernel for its {direction}"
    if static:
        candidate.refuse = lambda args: static
        return candidate
    assert file is not None
    launch.prepare()
    module = importlib.import_module(file)
    if native:
        target = launch.target(device)
        candidate.key = candidate.key._replace(target=target)
        candidate.function = lambda *args: launch.run_on_device(getattr(module, direction), args)
    else:
        run_simulated = language.module("simulate").run_simulated
        candidate.function = lambda *args: run_simulated(getattr(module, direction), args, target)
    candidate.refuse = refusal(language, target, getattr(module, "supports", None))
    return candidate


def refusal(language: Language, target: str, supports: Callable[..., str | None] | None) -> Refuse:
    """The reason why a language's kernel does not take arguments: a dtype that it lacks, or what its `supports` says."""
    dtypes = {getattr(torch, name) for name in language.dtypes}

    def refuse(args: tuple[Any, ...]) -> str | None:
        for a in args:
            if isinstance(a, Tensor) and a.dtype not in dtypes:
                name = str(a.dtype).removeprefix("torch.")
                return f"{name}: {language.no_dtype.get(name, f'{language.name} kernels take {sorted(language.dtypes)}')}"
        return supports(target, *args) if supports else None

    return refuse


def _plan(op: Op, direction: str, choice: Choice, device: torch.device) -> list[Candidate]:
    """The candidates in order: the chosen one, the platform's own, torch, and the reference, which never refuses."""
    where = platform(device.type)
    native = [name for name, language in LANGUAGES.items() if where in language.platforms]
    order = [choice.implementation] if choice.implementation else []
    order += [name for name in (*native, "torch", "reference") if name not in order]
    plan = []
    for name in order[: order.index("reference") + 1]:
        if name == "reference":
            plan.append(_reference(op, direction))
        elif name == "torch":
            file = kernel_file(op, name, direction)
            if file:
                candidate = Candidate(op, direction, "torch", "device", "")
                candidate.function = getattr(importlib.import_module(file), direction)
                supports = getattr(importlib.import_module(file), "supports", None)
                candidate.refuse = (lambda args, s=supports: s("", *args)) if supports else None
                plan.append(candidate)
            elif choice.implementation == "torch":
                candidate = Candidate(op, direction, "torch", "device", "")
                candidate.refuse = lambda args: f"{op.name} has no algorithm.py for its {direction}"
                plan.append(candidate)
        else:
            plan.append(_kernel(op, direction, LANGUAGES[name], where, choice, device))
    return plan


def body(op: Op, direction: str, captured: bool = False) -> Callable[..., Any]:
    """The function that runs for every device. Reads nothing that can change below the front door, except tensors.

    captured: it runs to be traced into a compiled graph, and is recorded as that.
    """
    function = op.function(direction)
    assert function is not None
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    defaults = [p.default for p in parameters]
    tensor = next((i for i, p in enumerate(parameters) if p.annotation is Tensor), None)
    forward = direction == "forward"
    check, check_all = op.check, checking(op)
    others = [(row.place, row.other) for row in tensor_rows(op) if row.place != tensor] if forward else []
    finish = None if forward else no_nones
    plans: dict[tuple[str, torch.device, torch.dtype], tuple[list[Candidate], bool]] = {}

    def make_plan(impl: str, device: torch.device, dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[list[Candidate], bool]:
        if forward:  # of the first tensor a plan knows device and dtype: once checked is enough
            check_all(*args)
        choice = parse(impl)
        candidates = _plan(op, direction, choice, device)
        if captured:
            for candidate in candidates:
                candidate.key = candidate.key._replace(how="captured")
        plan = plans[impl, device, dtype] = candidates, choice.strict
        return plan

    @untraced
    def run(*args: Any, impl: str = "") -> Any:
        if len(args) < len(defaults):  # the dispatcher drops arguments that equal their default
            args = (*args, *defaults[len(args) :])
        first = first_tensor(args) if tensor is None else args[tensor]
        device, dtype = first.device, first.dtype
        candidates, strict = plans.get((impl, device, dtype)) or make_plan(impl, device, dtype, args)
        if forward:
            for i, other in others:
                t = args[i]
                if t is not None and (t.device != device or (t.dtype != dtype and t.dtype != other)):
                    check_all(*args)
                    break
            check(*args)
        for candidate in candidates:
            refuse = candidate.refuse
            if refuse is None:
                break
            if candidate.kernel and _is_empty(args):  # nothing to launch: the reference, the last one, knows the shapes
                candidate = candidates[-1].because("empty input")
                break
            reason = refuse(args)
            if reason is None:
                break
            candidate.refused(reason, strict)
        candidate.tally.add()
        result = candidate.function(*args)
        return result if finish is None else finish(result, args)

    return run


def _is_empty(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, Tensor) and a.numel() == 0 for a in args)
