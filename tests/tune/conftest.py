"""Tuning files of these tests' own: neither the user's cache nor an operator's folder is read or written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kdk import tuning


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tuning, "user_file", lambda op, target: tmp_path / "user" / op.name / f"{target}.json")
    monkeypatch.setattr(tuning, "shipped_file", lambda op, target: tmp_path / "shipped" / op.name / f"{target}.json")
    tuning.forget()
    yield tmp_path
    tuning.forget()
