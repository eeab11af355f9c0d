"""What stands in a patched module's `forward`, and the trial that it has to pass before."""

from __future__ import annotations

import contextlib
import copy
import dis
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from kdk.decomposing import own_forward
from kdk.patterns import Trial
from kdk.recording import inlined
from kdk.selection import use

# Of the largest value in a row. With 16 bits anywhere the two may round in other places: only a wrong formula shows there.
FINE, COARSE = 1e-5, 2.0**-4


class Replacement:
    """Stands in the instance attribute `forward` of a module and calls a function with it.

    An object and not a closure: it pickles, and a deep copy of the module gets one that refers to the copy.

    module: the patched module. operators: what it uses. function: what runs, `(module, ...)`; None: the class's own forward
    with other functions in place of some globals, `swaps`. note: for the report.
    """

    def __init__(
        self,
        module: nn.Module,
        operators: tuple[str, ...],
        function: Callable[..., Any] | None = None,
        swaps: Mapping[str, Callable[..., Any]] | None = None,
        note: str = "",
    ) -> None:
        self.__setstate__((module, operators, function, dict(swaps or {}), note))

    def __getstate__(self) -> tuple[Any, ...]:
        return self.module, self.operators, None if self.swaps else self.function, self.swaps, self.note

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        # While a module is unpickled or copied it has no attributes yet: only its class may be read here.
        self.module, self.operators, function, self.swaps, self.note = state
        original = type(self.module).forward
        self.function: Callable[..., Any] = function or with_globals(original, self.swaps)
        own = inspect.signature(self.function).parameters.values()
        any_name = any(p.kind is p.VAR_POSITIONAL for p in own)
        self.rename = {} if any_name else dict(zip(_parameters(original), [p.name for p in own]))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            tensor = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            reason = own_forward(self.operators, tensor)
            if reason:
                for name in self.operators:
                    inlined(name, reason)
                return type(self.module).forward(self.module, *args, **kwargs)
        if kwargs and not self.swaps:
            kwargs = {self.rename.get(name, name): value for name, value in kwargs.items()}
        return self.function(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(type(self.module).forward, self.module))


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def with_globals(function: Callable[..., Any], new: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of `function`, below its decorators, that sees `new` among its globals as they are now.

    Raises TypeError where a decorator does not keep the function in its closure.
    """
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"{function!r} is not a plain Python function")
    scope, closure = function.__globals__, function.__closure__
    inner = function.__dict__.get("__wrapped__")
    if inner is None:
        scope = {**scope, **new}
        # dynamo takes the globals of a function that has a module's name from that module, where the originals are.
        scope.pop("__name__", None)
    else:
        places = [_contents(cell) is inner for cell in closure or ()]
        if not any(places):
            raise TypeError(f"the decorator of {function.__qualname__} hides it")
        changed = types.CellType(with_globals(inner, new))
        closure = tuple([changed if here else cell for cell, here in zip(closure or (), places)])
    result = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    result.__kwdefaults__ = function.__kwdefaults__
    result.__dict__.update({key: value for key, value in function.__dict__.items() if key != "__wrapped__"})
    result.__qualname__, result.__doc__ = function.__qualname__, function.__doc__
    result.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return result


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def global_functions(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The global Python functions that the code of a function names, below its decorators."""
    inner = inspect.unwrap(function)
    if not isinstance(inner, types.FunctionType):
        return {}
    names = {step.argval for step in dis.get_instructions(inner) if step.opname == "LOAD_GLOBAL"}
    found = {name: inner.__globals__.get(name) for name in sorted(names)}
    return {name: value for name, value in found.items() if isinstance(value, types.FunctionType)}


@contextlib.contextmanager
def quiet_trials() -> Iterator[None]:
    """Trials leave no trace: random state, autocast, default device and the choice of an implementation stay outside."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.no_grad(),
        use("reference"),
    ):
        torch.manual_seed(0)
        yield


def stand_in(module: nn.Module, trial: Trial, called: tuple[str, ...]) -> nn.Module:
    """A module of the same class and settings with the trial's attributes, in training mode, so that dropout shows."""
    double: nn.Module = object.__new__(type(module))
    double.__dict__.update(module.__dict__)
    for kind in ("_parameters", "_buffers", "_modules"):
        double.__dict__[kind] = dict(module.__dict__[kind])
    double.__dict__.pop("forward", None)
    double.training = True
    for name, child in module.named_children():
        if name not in called:
            setattr(double, name, copy.deepcopy(child).train())
    for name, value in trial.attributes.items():
        setattr(double, name, value)
    return double


def differences(
    original: Callable[..., Any], replacement: Callable[..., Any], trials: Iterable[tuple[Trial, tuple[Any, ...]]]
) -> str | None:
    """How the results of two functions differ on (trial, arguments), or None when all agree and one ran."""
    ran, failed = False, "there is no trial"
    for trial, args in trials:
        try:
            expected = original(*args)
        except Exception as error:
            # Foreign code may raise anything on a dtype or shape that it does not take: then nothing is asked of kdk.
            failed = f"the original does not run on a small example: {_first_line(error)}"
            continue
        try:
            got = replacement(*args)
        except Exception as error:
            return f"the replacement raises: {_first_line(error)}"
        ran = True
        reason = _difference(expected, got, _tolerance(trial))
        if reason:
            return reason
    return None if ran else failed


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__} {error}".splitlines()[0]


def _tolerance(trial: Trial) -> float:
    values = [*trial.args, *trial.attributes.values()]
    tensors = [t for v in values for t in (v.parameters() if isinstance(v, nn.Module) else (v,)) if isinstance(t, Tensor)]
    return FINE if all(t.dtype.itemsize >= 4 for t in tensors) else COARSE


def _difference(expected: Any, got: Any, tolerance: float) -> str | None:
    if isinstance(expected, Tensor):
        expected, got = (expected,), (got,)
    if not isinstance(expected, tuple) or len(expected) != len(got):
        return "the number of results differs"
    for e, g in zip(expected, got):
        if not isinstance(e, Tensor):
            return f"a result is no tensor but {type(e).__name__}"
        if (e.shape, e.dtype) != (g.shape, g.dtype):
            return f"the result is {g.dtype} {tuple(g.shape)} where the original's is {e.dtype} {tuple(e.shape)}"
        error, size = ((g.double() - e.double()).abs().amax(-1), e.double().abs().amax(-1))
        if not bool((error <= tolerance * size).all()):
            return "on a small example the results differ"
    return None
