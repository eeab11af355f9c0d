"""Repairs are taken only where they are needed, and then they are enough."""

import numpy as np
import pytest

pytest.importorskip("triton")
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kdk.backends.triton import repair
from kdk.backends.triton.builder import builder_class


def made(data, like):
    return TensorHandle(data, like.dtype)


# One builder for each fault, with the behaviour of the releases that had it.
FAULTS = {
    repair.ExternalFunctions: {"create_extern_elementwise": lambda self, *_: 1 / 0},
    repair.FmaRoundsOnce: {"create_fma": lambda self, x, y, z: made(x.data * y.data + z.data, z)},
    repair.MinMaxSkipNan: {"create_maxnumf": lambda self, a, b: made(np.maximum(a.data, b.data), a)},
    repair.HighHalfIsUnsigned: {
        "create_umulhi": lambda self, a, b: made((a.data.astype(np.int64) * b.data >> 32).astype(np.int32), a)
    },
    repair.OneBitWraps: {"binary_op": lambda self, a, b, op: made(op(a.data, b.data), a)},
    repair.HistogramBins: {
        "create_histogram": lambda self, data, bins, mask: made(np.histogram(data.data, bins, (0, bins))[0], data)
    },
}


def test_every_repair_has_its_fault_here():
    assert set(FAULTS) == set(repair.REPAIRS)


@pytest.mark.parametrize("cure", repair.REPAIRS, ids=lambda cure: cure.__name__)
def test_a_probe_sees_its_fault_and_the_repair_cures_it(cure):
    sick = type("Sick", (InterpreterBuilder,), FAULTS[cure])
    assert repair.fails(cure, sick())
    cured = type("Cured", (cure, sick), {})
    assert not repair.fails(cure, cured())


def test_a_release_that_is_right_is_left_alone(monkeypatch):
    right = type("Right", (*repair.REPAIRS, InterpreterBuilder), {})
    monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder", right)
    assert repair.needed_repairs() == []


def test_the_installed_release_gets_what_it_needs():
    stock = InterpreterBuilder()
    for cure in repair.REPAIRS:
        assert issubclass(builder_class(), cure) == repair.fails(cure, stock)
