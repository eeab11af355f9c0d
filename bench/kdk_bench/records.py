"""What every record carries: the environment's versions, the date, and how strong its evidence is."""

from __future__ import annotations

import datetime
import functools
import platform
from importlib.metadata import PackageNotFoundError, version

EVIDENCE = ("declared", "simulated", "compiled", "modelled", "measured")
PACKAGES = ("torch-kdk", "torch", "triton", "jax", "libtpu", "nki", "numpy", "transformers")


@functools.cache
def environment() -> dict[str, str]:
    """Versions of what a result depends on; what is not installed is left out."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def today() -> str:
    """The date as YYYY-MM-DD."""
    return datetime.date.today().isoformat()
