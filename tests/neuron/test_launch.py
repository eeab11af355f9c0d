"""Which chip a Trainium is, and what stands in the way of a launch where the vendor's packages are absent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kdk.backends.nki import launch

DEVICE = torch.device("cpu")  # the answer does not depend on it: a host has chips of one kind


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file that names the type of the instance; absent until a test writes it."""
    path = tmp_path / "product_name"
    monkeypatch.setattr(launch, "PRODUCT", path)
    monkeypatch.delenv(launch.OVERRIDE, raising=False)
    return path


@pytest.mark.parametrize(
    ("override", "expected"),
    [("trn2", "trn2"), ("gen3", "trn2"), ("TRN3", "trn3"), ("gen4", "trn3"), ("trn1", "trn1"), ("inf2", "inf2"), ("other", "")],
)
def test_the_override_names_the_chip(override: str, expected: str, product: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    product.write_text("trn2.48xlarge\n")
    monkeypatch.setenv(launch.OVERRIDE, override)
    assert launch.target(DEVICE) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("trn2.48xlarge\n", "trn2"), ("trn2u.48xlarge", "trn2"), ("trn3.large", "trn3"), ("inf2.xlarge", "inf2"), ("m5.large", "")],
)
def test_the_instance_names_the_chip(name: str, expected: str, product: Path) -> None:
    assert launch.target(DEVICE) == ""
    product.write_text(name)
    assert launch.target(DEVICE) == expected


def test_without_the_vendors_packages() -> None:
    for where in ("neuron", "xla:neuron"):
        reason = launch.missing(where)
        assert reason is not None and "nki is not installed" in reason and "AWS Neuron documentation" in reason
    assert launch.missing("cpu") is None
