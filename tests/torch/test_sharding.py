"""DTensor: the rules that follow from the declared letters, on one process and on two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.inputs import arguments, results
from tests.torch import sharded
from tests.torch.two_processes import run
from torch import Tensor

import kdk
from kdk import registry, sharding
from kdk.op import Op
from kdk.torch_library import Operator


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("two_processes")
    return run(sharded.cases, folder)


def test_on_two_processes(outcome: dict[str, str], operator: Operator) -> None:
    mine = {name: text for name, text in outcome.items() if name.partition(" ")[0] == operator.op.name}
    assert len(mine) >= 2 + len(operator.op.independent)
    assert {name: text for name, text in mine.items() if text} == {}


def halves(op: Op, values: dict[str, Any], letter: str, half: int) -> dict[str, Any]:
    """The arguments with one half of a letter's elements; of a starred letter, of its first dimension."""
    new = dict(values)
    for name in op.tensors:
        dims = sharding.labels(op.shapes[name], values[name].shape)
        if (letter, 0) in dims:
            new[name] = values[name].chunk(2, dims.index((letter, 0)))[half]
    return new


def falls_into_parts(op: Op, letter: str) -> bool:
    values = arguments(op, torch.float64)
    names = (*op.outputs, *op.saved)
    whole = dict(zip(names, results(op.reference(**values))))
    try:
        parts = [dict(zip(names, results(op.reference(**halves(op, values, letter, i))))) for i in range(2)]
    except Exception:
        return False
    for name, expected in whole.items():
        dims = sharding.labels(op.shapes[name], expected.shape)
        if (letter, 0) in dims:
            found: list[Tensor] = [torch.cat([part[name] for part in parts], dims.index((letter, 0)))]
        else:
            found = [part[name] for part in parts]
        for t in found:
            if t.shape != expected.shape or not torch.allclose(t, expected):
                return False
    return True


def test_the_declared_letters_are_the_independent_ones(operator: Operator) -> None:
    """Neither one too many, which would be wrong, nor one too few, which would communicate for nothing."""
    op = operator.op
    letters = {letter for name in op.tensors for letter in sharding.letters(op.shapes[name])}
    returned = {letter for name in op.outputs for letter in sharding.letters(op.shapes[name])}
    assert {letter for letter in letters & returned if falls_into_parts(op, letter)} == set(op.independent)


def test_explain() -> None:
    assert sharding.explain("rms_norm").splitlines() == [
        "rms_norm: every tensor replicated, or sharded along",
        "  N: x, y sharded; weight replicated; gradient of weight Partial",
        "  H: no: y sums over H; DTensor gathers it first",
    ]
    assert "  D: no: the elements along D belong together" in sharding.explain("rope")
    assert "k_out replicated; gradient of k replicated" in sharding.explain("rope")
    with pytest.raises(kdk.errors.UsageError, match="rms_nrom"):
        sharding.explain("rms_nrom")


def test_labels() -> None:
    assert sharding.labels("*N H", (2, 3, 4)) == [("N", 0), ("N", 1), ("H", 0)]
    assert sharding.labels("*N", ()) == [] and sharding.labels("*N H", (4,)) == [("H", 0)]
    assert sharding.labels("B|1 S R", (1, 3, 4)) == [None, ("S", 0), ("R", 0)]
    assert sharding.labels("B|1 S R", (2, 3, 4))[0] == ("B", 0)
    assert sharding.labels("B S Hq D", (3, 2, 4)) == [("S", 0), ("Hq", 0), ("D", 0)]
    assert sharding.labels("N H", (2, 3, 4)) == [None, None, None]


RULES = """
rules = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
assert {torch.ops.kdk.rms_norm.default, torch.ops.kdk.rms_norm_backward.default} <= set(rules)
assert not any(type(finder).__module__ == "kdk.sharding" for finder in sys.meta_path)
"""


@pytest.mark.parametrize(
    "program",
    [
        "import kdk.ops\nassert 'torch.distributed.tensor' not in sys.modules\nimport torch.distributed.tensor",
        "import kdk.ops\nimport torch.distributed.tensor.parallel",
        "import torch.distributed.tensor\nimport kdk.ops",
    ],
)
def test_whichever_is_imported_first(program: str) -> None:
    subprocess.run([sys.executable, "-c", f"import sys, torch\n{program}\n{RULES}"], check=True)


def test_a_torch_that_takes_no_rules_stays_importable() -> None:
    def fail() -> None:
        raise AttributeError("no such thing")

    watch = sharding._Watch()
    watch.waiting.append(fail)
    with pytest.warns(kdk.FallbackWarning, match="no DTensors with this torch: AttributeError: no such thing"):
        watch._arrived()


def test_a_gradient_that_mixes_parts_and_whole_is_not_split() -> None:
    """An input that two outputs read, one of which lacks the letter, and whose gradient sums over it."""
    op = registry.OPERATORS["scale_both"].op
    assert sharding._gradient(op, "b", "H") == sharding.SAME
    mixed = Op(**{**{f: getattr(op, f) for f in op.__dataclass_fields__}, "longest": {"grad b": "H"}})
    assert sharding._gradient(mixed, "b", "H") == sharding.IMPOSSIBLE
    class Spec:
        placements = ()

        def __init__(self, *shape: int) -> None:
            self.shape = shape

    specs = (Spec(3, 4), Spec(3), 2.0, "a,b")
    both = sharding.Rule(op, "backward")(*specs)
    fewer = sharding.Rule(mixed, "backward")(*specs)
    assert len(both) == 3 and len(fewer) == 2  # replicated, along N (and along H)
