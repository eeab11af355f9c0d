"""Which versions fit together: by the packages' own metadata, by kdk's own tests, and by a dated table of vendors' documents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

FITS, DOES_NOT_FIT, UNKNOWN = "fits", "does not fit", "unknown"

EXTRAS = {"torch-kdk": ("triton", "tpu", "jax", "neuron"), "jax": ("tpu",), "torch-xla": ("tpu", "pallas")}
"""Extras whose requirements count when the package that they name is there anyhow."""

TESTED = {
    "torch": "2.13.0",
    "triton": "3.9.0",
    "jax": "0.10.2",
    "libtpu": "0.0.52",
    "numpy": "2.4.6",
    "scipy": "1.17.1",
    "ml-dtypes": "0.6.0",
    "transformers": "5.24.0",
}
"""What kdk's own tests run on: the versions of constraints.txt."""
TESTED_ON = "2026-11-30"

PAIRS = (("torch", "triton"), ("jax", "libtpu"))
"""Packages that must fit each other even where no metadata says to which versions."""


@dataclass(frozen=True)
class Known:
    """A line of the table: `package` in `versions` needs `other` in `wants`. "{minor}" is the package's own, as in 2.9.

    otherwise: the verdict where it does not hold.
    """

    package: str
    versions: str
    other: str
    wants: str
    source: str
    date: str
    otherwise: str = DOES_NOT_FIT


KNOWN = (
    Known("torch", "==2.11.*", "triton", "==3.6.*", "metadata of torch 2.11.0 as published (CPU builds leave it out)", "2026-11-30"),
    Known("torch-xla", "", "torch", "=={minor}.*", "pytorch/xla's README: both of one version; 2.9 is the latest", "2026-11-30"),
    Known("torch-neuronx", "", "torch", "=={minor}.*", "AWS Neuron SDK 2.32, 2.33: 2.9.0.2.15 for torch 2.9, 2.14 for 2.14", "2026-10-19"),
    Known(
        "torch-neuronx",
        ">=2.14",
        "python",
        ">=3.12,<3.15",
        "AWS Neuron SDK 2.33, quickstart (its page of best practices says 3.10 to 3.14)",
        "2026-10-19",
        otherwise=UNKNOWN,
    ),
    Known("torch-neuronx", ">=2.14", "nki", ">=0.7", "AWS Neuron SDK 2.33 ships NKI 0.7", "2026-10-19", otherwise=UNKNOWN),
    Known(
        "torch-kdk",
        "",
        "nki",
        ">=0.6,<0.8",
        "kdk's NKI kernels are written to what 0.6 and 0.7 share; only kdk's emulator has run them",
        "2026-11-30",
        otherwise=UNKNOWN,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """One combination that was found. packages: name -> version ("" where it says none)."""

    packages: Mapping[str, str]
    wants: str
    verdict: str
    source: str
    date: str = ""
    way_out: str = field(default="")

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "packages": dict(self.packages)}


def canonical(name: str) -> str:
    """The one spelling of a distribution's name: ml_dtypes is ml-dtypes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def fits(found: Mapping[str, str]) -> list[Fit]:
    """Every combination of the packages found (canonical name -> version) that some source says something about."""
    result = [*_by_metadata(found), *_by_table(found)]
    judged = {frozenset(fit.packages) for fit in result}
    for package, other in PAIRS:
        if package in found and other in found and frozenset((package, other)) not in judged:
            result.append(_judge(package, other, found, "", "no metadata and no document that kdk knows says", "", UNKNOWN))
    return result


def _by_metadata(found: Mapping[str, str]) -> Iterator[Fit]:
    for package in found:
        for requirement in _requirements(package):
            other = canonical(requirement.name)
            if other in found and other != package and requirement.specifier:
                source = f"metadata of {package} {found[package]}"
                yield _judge(package, other, found, str(requirement.specifier), source, "", DOES_NOT_FIT)


def _requirements(package: str) -> Iterator[Requirement]:
    """What a distribution asks for here, its EXTRAS included; once each."""
    try:
        lines = requires(package) or []
    except PackageNotFoundError:
        return
    seen = set()
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # pip ignores it too
        extras = ("", *EXTRAS.get(package, ()))
        key = (canonical(requirement.name), str(requirement.specifier))
        if key not in seen and (requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in extras)):
            seen.add(key)
            yield requirement


def _by_table(found: Mapping[str, str]) -> Iterator[Fit]:
    for known in KNOWN:
        if known.package not in found or known.other not in found:
            continue
        version = _version(found[known.package])
        if version is None:
            wants = known.wants if "{minor}" not in known.wants else ""
            yield _judge(known.package, known.other, found, wants, f"{known.package} says no version", known.date, UNKNOWN)
        elif version in SpecifierSet(known.versions, prereleases=True):
            wants = known.wants.format(minor=f"{version.major}.{version.minor}")
            yield _judge(known.package, known.other, found, wants, known.source, known.date, known.otherwise)


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _judge(package: str, other: str, found: Mapping[str, str], wants: str, source: str, date: str, otherwise: str) -> Fit:
    """The verdict on a pair. What kdk's own tests run on fits, whatever a pin says; the source then names both."""
    packages = {package: found[package], other: found[other]}
    version = _version(found[other])
    if wants and version is not None and version in SpecifierSet(wants, prereleases=True):
        return Fit(packages, f"{other}{wants}", FITS, source, date)
    text = f"{other}{wants}" if wants else "not known"
    if all(p in TESTED and _public(v) == TESTED[p] for p, v in packages.items()):
        asks = f"; {source} asks for {text}" if wants else ""
        return Fit(packages, text, FITS, f"kdk's own tests run on this pair{asks}", TESTED_ON)
    verdict = otherwise if version is not None else UNKNOWN
    way_out = f"pip install '{other}{wants}'" if wants and other != "python" else "use versions that kdk is tested with, or try and see"
    return Fit(packages, text, verdict, source, date, way_out)


def _public(version: str) -> str:
    """Without the local part: 2.13.0+cpu is 2.13.0."""
    return version.partition("+")[0]
