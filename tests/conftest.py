"""For every test."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws from torch's own generator is the same in every run: a failure can be repeated."""
    torch = sys.modules.get("torch")  # some tests run without it
    if torch is not None:
        torch.manual_seed(0)
