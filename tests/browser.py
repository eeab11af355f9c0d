"""Debian's Chromium, for the tests that open a page."""

from __future__ import annotations

import shutil
import tempfile

import pytest


def chromium() -> list[str]:
    """The command that starts it headless; the test is skipped, and says so, where it is not installed."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("chromium is not installed: make browser")
    profile = tempfile.mkdtemp(prefix="kdk-chromium-")
    quiet = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic")
    return [found, "--headless", "--no-sandbox", "--disable-gpu", *quiet, f"--user-data-dir={profile}"]
