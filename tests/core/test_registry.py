"""How operators are found: packages that announce themselves, and bare folders."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kdk.ops
from kdk import registry
from kdk.errors import DeclarationError, UsageError

REFERENCE = """
from torch import Tensor

def {name}(x: Tensor) -> Tensor:
    \"\"\"Twice x.\"\"\"
    return x * 2

def check(x: Tensor) -> None: ...
"""
DECLARATION = """
from kdk import Op
from . import reference

op = Op(reference=reference.{name}, check=reference.check, kind="elementwise", outputs=("y",), shapes={{"x": "N", "y": "N"}})
"""


def folder(path: Path, name: str = "", declaration: str = DECLARATION) -> Path:
    """An operator's folder that doubles its input."""
    path.mkdir(parents=True)
    (path / "reference.py").write_text(REFERENCE.format(name=name or path.name))
    (path / "__init__.py").write_text(declaration.format(name=name or path.name))
    return path


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    before, modules = dict(registry.OPERATORS), set(sys.modules)
    yield
    registry.OPERATORS.clear()
    registry.OPERATORS.update(before)
    for name in set(sys.modules) - modules:
        if name.startswith("kdk_folder_"):
            del sys.modules[name]


def test_kdks_own() -> None:
    assert "rms_norm" in registry.OPERATORS
    assert dir(kdk.ops) == sorted(registry.OPERATORS)
    assert kdk.ops.rms_norm is registry.OPERATORS["rms_norm"].call


def test_a_folder_and_a_folder_of_folders(tmp_path: Path) -> None:
    (one,) = registry.load_directory(folder(tmp_path / "one" / "registry_one"))
    assert torch.equal(kdk.ops.registry_one(torch.ones(2)), torch.full((2,), 2.0))
    assert one.op.package == "kdk_folder_registry_one"
    folder(tmp_path / "many" / "registry_two")
    folder(tmp_path / "many" / "registry_three")
    (tmp_path / "many" / "notes").mkdir()
    names = [operator.op.name for operator in registry.load_directory(str(tmp_path / "many"))]
    assert names == ["registry_three", "registry_two"]
    assert {"registry_one", *names} <= set(dir(kdk.ops))


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no such folder: got .*absent"):
        registry.load_directory(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"no operator in the folder.*reference\.py"):
        registry.load_directory(tmp_path)


def test_declarations_that_are_none(tmp_path: Path) -> None:
    (folder(tmp_path / "a" / "bare") / "__init__.py").unlink()
    with pytest.raises(DeclarationError, match=r"needs an __init__\.py"):
        registry.load_directory(tmp_path / "a" / "bare")
    with pytest.raises(DeclarationError, match=r"has no `op`.*op = kdk\.Op"):
        registry.load_directory(folder(tmp_path / "no_op", declaration=""))
    foreign = "from kdk_kernels.rms_norm import op  # {name}"
    with pytest.raises(DeclarationError, match="declares a foreign reference"):
        registry.load_directory(folder(tmp_path / "foreign", declaration=foreign))


def test_one_name_twice(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="two operators have one name: got rms_norm in kdk_folder_mine"):
        registry.load_directory(folder(tmp_path / "mine", "rms_norm"))
    assert registry.OPERATORS["rms_norm"].op.package == "kdk_kernels.rms_norm"
    registry.load_directory(folder(tmp_path / "a" / "registry_same", "registry_a"))
    with pytest.raises(DeclarationError, match="a folder of this name is loaded"):
        registry.load_directory(folder(tmp_path / "b" / "registry_same", "registry_b"))


def test_a_folder_that_raises_leaves_nothing(tmp_path: Path) -> None:
    path = folder(tmp_path / "registry_raises", declaration="raise RuntimeError('broken')  # {name}")
    with pytest.raises(DeclarationError, match=r"registry_raises cannot be imported: got RuntimeError: broken \(__init__\.py, line 1\)"):
        registry.load_directory(path)
    assert "kdk_folder_registry_raises" not in sys.modules
    (path / "__init__.py").write_text(DECLARATION.format(name="registry_raises"))
    (repaired,) = registry.load_directory(path)
    assert repaired.op.name == "registry_raises"


def test_a_checkout_that_is_not_installed_has_kdks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing announces them there; where something does, they come once."""
    once = [e.value for e in registry._announced()].count("kdk_kernels")
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    assert once == 1 and [e.value for e in registry._announced()] == ["kdk_kernels"]
