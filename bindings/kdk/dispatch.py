"""The body of an operator: which implementation runs a call, on tensors that are real. One per operator and direction."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C import _is_alias_of  # type: ignore[attr-defined]
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy  # type: ignore[import-not-found]

from kdk import registry, tuning
from kdk.backends import LANGUAGES, Language
from kdk.checking import checking, tensor_rows
from kdk.errors import DeclarationError, FallbackWarning, RefusedError
from kdk.indices import INTEGERS, Indices
from kdk.layouts import format_for, promised
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

    def misconfigured(self, reason: str, strict: bool) -> None:
        """The same for recorded launch parameters: the kernel runs, with those that it chooses itself."""
        key = self.key
        problem = f"{key.op}.{key.direction}: recorded launch parameters of {key.implementation} for {key.target} are not taken"
        if strict:
            way_out = f"`kdk tune {key.op} --target {key.target}` records new ones; without kdk.strict() the kernel chooses by itself"
            raise RefusedError("KDK-TUNING", problem, value=reason, way_out=way_out)
        if tally(key._replace(how="refused", reason=reason)).add() == 1:
            warnings.warn(f"{problem}, it chooses by itself: {reason}", FallbackWarning, stacklevel=3)


def kernel_file(op: Op, implementation: str, direction: str) -> str | None:
    """The import name of the file that holds a kernel, or None when the operator has none."""
    name = f"{op.package}.{FILES[implementation]}{'' if direction == 'forward' else '_backward'}"
    if importlib.util.find_spec(name):
        return name
    if direction == "backward" and op.backward_by:
        return kernel_file(_other(op), implementation, "forward")
    return None


def _other(op: Op) -> Op:
    """The operator whose kernels are those of this one's backward."""
    found = registry.OPERATORS.get(op.backward_by)
    if found is None or len(found.op.outputs) != 1 or found.op.saved:
        limit = "another registered operator with one output and nothing saved"
        way_out = f"correct `backward_by` in {op.package}"
        raise DeclarationError("KDK-DECLARATION", f"{op.name}: `backward_by`", value=op.backward_by, limit=limit, way_out=way_out)
    return found.op


class Kernel(NamedTuple):
    """A kernel's file, the name of its function, why it may not take a call, and what it is called with."""

    module: ModuleType
    name: str
    supports: Callable[..., str | None] | None
    arguments: Callable[..., tuple[Any, ...]]

    @property
    def function(self) -> Callable[..., Any]:
        """Looked up at each call: a file that is loaded anew takes effect."""
        return getattr(self.module, self.name)  # type: ignore[no-any-return]

    @property
    def tunable(self) -> Mapping[str, tuple[Any, ...]]:
        """Its launch parameters and their legal values."""
        return getattr(self.module, "TUNABLE", {})

    def configured(self, parameters: Mapping[str, Any]) -> Callable[..., Any]:
        """The function with launch parameters; those that are left out are the kernel's own choice."""
        return tuning.bound(self.function, tuple(sorted(parameters.items()))) if self.tunable else self.function

    def refuses(self, target: str, parameters: Mapping[str, Any], args: tuple[Any, ...]) -> str | None:
        """Why it does not take launch parameters on such arguments (its own, as `arguments` makes them)."""
        wrong = tuning.illegal(parameters, self.tunable, self.module.__name__)
        return wrong or (self.supports(target, *args, **parameters) if self.supports else None)


def _dtype_name(a: Any) -> Any:
    return str(a).removeprefix("torch.") if isinstance(a, torch.dtype) else a


def load_kernel(op: Op, implementation: str, direction: str) -> Kernel | None:
    """A direction's kernel in one language, its file imported; None when the operator has none."""
    name = kernel_file(op, implementation, direction)
    if name is None:
        return None
    own = name.startswith(f"{op.package}.")
    module = importlib.import_module(name)
    taken = op.backward_as if not own and op.backward_as else lambda *args: args
    named = implementation in LANGUAGES and LANGUAGES[implementation].names_dtypes
    arguments = (lambda *args: tuple(map(_dtype_name, taken(*args)))) if named else taken
    return Kernel(module, direction if own else "forward", getattr(module, "supports", None), arguments)


def as_promised(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with results in the promised memory format that share no memory with an argument or with each other.

    What every implementation owes and the fake promises.
    """

    def fix(t: Tensor | None, others: Sequence[Any], rank: int, kept: torch.memory_format) -> Tensor | None:
        if t is None:
            return None
        wanted = format_for(t, rank, kept)
        for other in others:  # not t._is_view(), which knows no views in inference mode
            if isinstance(other, Tensor) and _is_alias_of(t, other):
                return t.clone(memory_format=wanted)
        return t.contiguous(memory_format=wanted)

    def run(*args: Any) -> Any:
        rank, kept = promised(args) if op.layouts else (0, torch.contiguous_format)
        result = function(*args)
        if result is None or isinstance(result, Tensor):
            return fix(result, args, rank, kept)
        fixed: list[Tensor | None] = []
        for t in result:
            fixed.append(fix(t, (*args, *fixed), rank, kept))
        return tuple(fixed)

    return run


def no_nones(result: Any, args: tuple[Any, ...]) -> Any:
    """A schema's results are tensors: what a backward did not compute becomes an empty one."""
    if isinstance(result, Tensor):
        return result
    if result is None:
        return first_tensor(args).new_empty(0)
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
    candidate.function = as_promised(op, function)
    return candidate


def _counted(candidate: Candidate, op: Op) -> Callable[..., Any]:
    """A kernel's function whose results are as many as declared: torch's own words about them would not help its author."""
    function, key = candidate.function, candidate.key
    names = [*op.outputs, *op.saved] if key.direction == "forward" else [f"grad {name}" for name in op.uses]

    def run(*args: Any) -> Any:
        result = function(*args)
        got = len(result) if isinstance(result, tuple) else 1
        if got != len(names):
            problem = f"{key.op}.{key.direction}: the number of results of {key.implementation}"
            limit, way_out = f"{len(names)}: {', '.join(names)}", "return them in this order"
            raise DeclarationError("KDK-RESULTS", problem, value=got, limit=limit, way_out=way_out)
        return result

    return run


def _kernel(op: Op, direction: str, language: Language, where: str, choice: Choice, device: torch.device) -> Candidate:
    """A language's kernel: on its own platforms on the device, on a CPU's tensors in its simulator, refused elsewhere."""
    native = where in language.platforms
    target = "" if native else choice.target or language.targets[0]
    candidate = Candidate(op, direction, language.name, "device" if native else "simulated", target)
    launch = language.module("launch")
    static = None if native or where in language.simulated else f"it does not run on {where}"
    static = static or launch.missing(where)
    if kernel_file(op, language.name, direction) is None:
        static = f"{op.name} has no {language.name} kernel for its {direction}"
    if static:
        candidate.refuse = lambda args: static
        return candidate
    launch.prepare()
    kernel = load_kernel(op, language.name, direction)
    assert kernel is not None
    if native:
        target = launch.target(device)
        candidate.key = candidate.key._replace(target=target)
        run = launch.run_on_device
    else:
        run_simulated = language.module("simulate").run_simulated
        run = functools.partial(_on_target, run_simulated, target)
    refused = functools.partial(candidate.misconfigured, strict=choice.strict)
    parameters = tuning.launch_parameters(op, direction, target, kernel, refused)
    candidate.function = lambda *args: run(kernel.configured(parameters(args)), kernel.arguments(*args))
    candidate.function = _counted(candidate, op)
    if op.layouts and not language.strided:
        candidate.function = as_promised(op, candidate.function)
    candidate.refuse = refusal(language, target, kernel)
    return candidate


def _on_target(run_simulated: Callable[..., Any], target: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return run_simulated(function, args, target)


def refusal(language: Language, target: str, kernel: Kernel) -> Refuse:
    """The reason why a language's kernel does not take arguments: a dtype that it lacks, or what its `supports` says."""
    dtypes = {getattr(torch, name) for name in language.dtypes}

    def refuse(args: tuple[Any, ...]) -> str | None:
        for a in args:
            if isinstance(a, Tensor) and a.dtype not in dtypes:
                name = str(a.dtype).removeprefix("torch.")
                return f"{name}: {language.no_dtype.get(name, f'{language.name} kernels take {sorted(language.dtypes)}')}"
        return kernel.supports(target, *kernel.arguments(*args)) if kernel.supports else None

    return refuse


def _algorithm(op: Op, direction: str, kernel: Kernel) -> Candidate:
    """The faster way in plain torch."""
    candidate = Candidate(op, direction, "torch", "device", "")
    candidate.function = lambda *args: kernel.function(*kernel.arguments(*args))
    supports = kernel.supports
    candidate.refuse = (lambda args: supports("", *kernel.arguments(*args))) if supports else None
    return candidate


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
            kernel = load_kernel(op, name, direction)
            if kernel:
                plan.append(_algorithm(op, direction, kernel))
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
    parameters = inspect.signature(function, eval_str=True).parameters
    defaults = [p.default for p in parameters.values()]
    forward = direction == "forward"
    check, check_all = op.check, checking(op)
    rows = tensor_rows(op) if forward else ()
    order = [row.name for row in rows] or [name for name in parameters if name not in op.indexes]
    tensor = next((list(parameters).index(name) for name in order if parameters[name].annotation is Tensor), None)
    others = [(row.place, row.other, row.points, row.optional) for row in rows if row.place != tensor]
    indices = Indices(op, direction)
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
        try:
            device, dtype = first.device, first.dtype
        except AttributeError:  # torch takes None for a tensor
            check_all(*args)
            raise
        candidates, strict = plans.get((impl, device, dtype)) or make_plan(impl, device, dtype, args)
        if forward:
            for i, other, points, optional in others:
                t = args[i]
                if t is None and optional:
                    continue
                if t is None or t.device != device or (t.dtype not in INTEGERS if points else t.dtype != dtype and t.dtype != other):
                    check_all(*args)
                    break
            check(*args)
            if indices and strict and not captured:
                indices.check(args)
        for candidate in candidates:
            refuse, given = candidate.refuse, args
            if refuse is None:
                break
            if candidate.kernel:
                if _is_empty(args):  # nothing to launch: the reference, the last one, knows the shapes
                    candidate = candidates[-1].because("empty input")
                    break
                given = indices.narrowed(args) if indices else args
            reason = refuse(given)
            if reason is None:
                break
            candidate.refused(reason, strict)
        candidate.tally.add()
        result = candidate.function(*given)
        return result if finish is None else finish(result, args)

    return run


def _is_empty(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, Tensor) and a.numel() == 0 for a in args)
