"""Every error of kdk: a stable code, what was wrong with its value, the limit, and the way out."""

from __future__ import annotations

from typing import Any


class KdkError(Exception):
    """Base of all errors. The text carries everything, because torch.compile re-wraps exceptions and keeps only the text."""

    def __init__(self, code: str, problem: str, *, value: Any = None, limit: str = "", way_out: str = "") -> None:
        self.code, self.problem, self.value, self.limit, self.way_out = code, problem, value, limit, way_out
        text = f"[{code}] {problem}"
        if value is not None:
            text += f": got {value}"
        if limit:
            text += f"; {limit}"
        if way_out:
            text += f". Way out: {way_out}"
        self.text = text
        self.args = (text,)  # dynamo cannot trace super().__init__ here

    def __reduce__(self) -> tuple[Any, ...]:  # the keyword arguments would be lost on the way to another process
        return _rebuild, (type(self), self.code, self.problem, self.value, self.limit, self.way_out)


def _rebuild(cls: type[KdkError], code: str, problem: str, value: Any, limit: str, way_out: str) -> KdkError:
    return cls(code, problem, value=value, limit=limit, way_out=way_out)


class InputError(KdkError, ValueError):
    """The arguments of an operator do not fit together or are not what it takes."""


class UsageError(KdkError, ValueError):
    """A name, an option or an environment variable that kdk does not know."""


class DeclarationError(KdkError, ValueError):
    """An operator's folder does not say what kdk needs to know."""


class RefusedError(KdkError, RuntimeError):
    """Under strict: an implementation refused a call, and moving on to the next one was forbidden."""


class ShardingError(RefusedError, NotImplementedError):
    """Under strict: a DTensor is sharded where the operator needs it whole. (Of all errors that are raised in a rule, DTensor
    hands on a NotImplementedError as it is, and makes a RuntimeError of the others.)"""


class GradientError(KdkError, RuntimeError):
    """A derivative that the operator does not have: of a backward, or for an argument that is not differentiable."""


class SimulationError(KdkError, RuntimeError):
    """A simulator found a fault in a kernel."""


class FallbackWarning(UserWarning):
    """An implementation that was asked for, or that is the platform's own, refused a call; another one ran."""


class UsageWarning(UserWarning):
    """An environment variable names something that kdk does not know, or not yet."""


class ProviderWarning(UserWarning):
    """A package announced operators and could not be loaded."""
