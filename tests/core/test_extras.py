"""The extras: every one that a message names exists, and a back end that lacks a package says which extra brings it."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from kdk.backends import LANGUAGES

ROOT = Path(__file__).parents[2]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_extra_that_a_text_names_exists() -> None:
    files = [f for folder in ("bindings", "kernels", "bench", "docs") for f in (ROOT / folder).rglob("*") if f.suffix in (".py", ".md")]
    texts = [f.read_text() for f in [*files, ROOT / "README.md", ROOT / "pyproject.toml"]]
    named = {extra for text in texts for extras in re.findall(r"torch-kdk\[([\w,]+)\]", text) for extra in extras.split(",")}
    assert named and named <= set(EXTRAS)
    assert set(EXTRAS) == {"triton", "tpu", "jax", "neuron", "bench", "dev"}


def test_no_extra_asks_for_a_package_that_is_empty_where_pip_looks() -> None:
    asked = {re.split(r"[\[<>=]", r)[0] for requirements in EXTRAS.values() for r in requirements}
    assert asked.isdisjoint({"nki", "torch-neuronx", "torch_neuronx", "neuronx-cc"})


NEEDED = [
    ("triton", "cuda", "triton"),
    ("triton", "cpu", "triton"),
    ("triton", "cpu", "ml_dtypes"),
    ("triton", "cpu", "scipy"),
    ("pallas", "cpu", "jax"),
    ("nki", "cpu", "ml_dtypes"),
]


@pytest.mark.parametrize(("language", "where", "package"), NEEDED)
def test_what_is_missing(language: str, where: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *more: Any) -> Any:
        return None if name == package else find(name, *more)

    missing = LANGUAGES[language].module("launch").missing
    missing = getattr(missing, "__wrapped__", missing)  # past the cache
    assert missing(where) is None
    monkeypatch.setattr(importlib.util, "find_spec", without)
    message = missing(where)
    assert message is not None and package in message
    (extra,) = re.findall(r"pip install 'torch-kdk\[(\w+)\]'", message)
    assert any(r.startswith(package) for r in EXTRAS[extra])


def test_a_gpu_needs_no_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in ("ml_dtypes", "scipy") else find(name, *more))
    assert LANGUAGES["triton"].module("launch").missing.__wrapped__("cuda") is None


def test_the_environment_that_looks_at_no_dependencies_has_kdks_own() -> None:
    """`make test-xla` installs what constraints-xla.txt lists and nothing else."""
    listed = {line.partition("==")[0].lower() for line in (ROOT / "constraints-xla.txt").read_text().splitlines()}
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {Requirement(text).name for text in needed} <= listed
