"""Errors say what was wrong, the value, the limit and the way out, and survive the way to another process."""

from __future__ import annotations

import copy
import pickle

import pytest

from kdk import errors
from kdk.errors import KdkError

ERRORS = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, KdkError)]
WARNINGS = [w for w in vars(errors).values() if isinstance(w, type) and issubclass(w, Warning)]


def error(cls: type[KdkError]) -> KdkError:
    return cls("KDK-X", "the size", value=7, limit="at most 5", way_out="split it")


@pytest.mark.parametrize("cls", ERRORS)
def test_text(cls: type[KdkError]) -> None:
    e = error(cls)
    assert str(e) == e.text == "[KDK-X] the size: got 7; at most 5. Way out: split it"
    assert e.args == (e.text,)
    assert str(cls("KDK-Y", "alone")) == "[KDK-Y] alone"


@pytest.mark.parametrize("cls", ERRORS)
def test_pickle_and_copy(cls: type[KdkError]) -> None:
    e = error(cls)
    for other in (pickle.loads(pickle.dumps(e)), copy.copy(e), copy.deepcopy(e)):
        assert type(other) is cls and str(other) == str(e)
        assert (other.code, other.problem, other.value) == ("KDK-X", "the size", 7)
        assert (other.limit, other.way_out) == ("at most 5", "split it")


def test_builtin_bases() -> None:
    """What does not know kdk can catch them too."""
    assert issubclass(errors.InputError, ValueError) and issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.RefusedError, RuntimeError) and issubclass(errors.GradientError, RuntimeError)
    assert all(issubclass(w, UserWarning) for w in WARNINGS)
