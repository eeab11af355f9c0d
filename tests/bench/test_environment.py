"""`kdk env`, on packages that are nothing but metadata."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kdk.backends.nki import emulator
from kdk_bench import cli, environment, identity, versions

ROOT = Path(__file__).parents[2]
KDK = ROOT / "bindings" / "kdk"


class Site:
    """A site-packages of the test's own, the only folder on sys.path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, version: str, *requires: str, module: str | None = "", summary: str = "") -> None:
        """A distribution and its module (None: none, another name than its own: that)."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", f"Summary: {summary}"]
        extras = {e for r in requires for e in re.findall(r'extra == "(\w+)"', r)}
        lines += [f"Provides-Extra: {e}" for e in sorted(extras)] + [f"Requires-Dist: {r}" for r in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        if module is not None:
            self.module(module or name.replace("-", "_"))

    def module(self, name: str, text: str = "raise AssertionError('imported to answer kdk env')") -> None:
        (self.folder / name).mkdir()
        (self.folder / name / "__init__.py").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(environment, "device_files", list)
    monkeypatch.chdir(tmp_path)
    return Site(tmp_path)


def env(tmp_path: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and report of `kdk env`."""
    with pytest.raises(SystemExit) as done:
        cli.main(["env", "--json", str(tmp_path / "env.json")])
    return int(str(done.value.code)), json.loads((tmp_path / "env.json").read_text())


def states(report: dict[str, Any]) -> dict[str, str]:
    return {t["name"]: t["state"] for t in report["toolchains"]}


def verdict(report: dict[str, Any], *packages: str) -> dict[str, Any]:
    (fit,) = [f for f in report["versions"] if set(f["packages"]) == set(packages)]
    return fit


def test_what_is_there_and_what_is_missing(site: Site, tmp_path: Path) -> None:
    site.add("torch-kdk", "0.1.0", "torch>=2.11", 'triton>=3.6; extra == "triton"', module=None)
    site.add("torch", "2.14.0", 'triton==3.10.0; sys_platform == "linux"', 'triton==9; sys_platform == "win32"')
    site.add("triton", "3.10.0")
    site.add("ml_dtypes", "0.6.0")
    code, report = env(tmp_path)
    assert code == 0 and report["schema"] == "kdk.env/1" and report["python"]
    assert [n for n, s in states(report).items() if s == "found"] == ["torch-kdk", "torch", "triton", "ml-dtypes"]
    missing = {t["name"]: t["get"] for t in report["toolchains"] if t["state"] == "absent"}
    assert missing["jax"] == "pip install 'torch-kdk[jax]'" and "AWS Neuron documentation" in missing["nki"]
    assert verdict(report, "torch", "triton")["source"] == "metadata of torch 2.14.0"
    assert {f["verdict"] for f in report["versions"]} == {"fits"} and len(report["versions"]) == 3


@pytest.mark.parametrize(
    ("packages", "pair", "expected", "source"),
    [
        ([("torch", "2.13.0", "triton==3.8.0"), ("triton", "3.7.0")], ("torch", "triton"), "does not fit", "metadata of torch 2.13.0"),
        ([("torch", "2.13.0+cpu", "triton==3.8.0"), ("triton", "3.9.0")], ("torch", "triton"), "fits", "own tests.*asks for triton==3.8.0"),
        ([("torch", "2.11.0+cpu"), ("triton", "3.6.0")], ("torch", "triton"), "fits", "torch 2.11.0 as published"),
        ([("torch", "2.11.0+cpu"), ("triton", "3.9.0")], ("torch", "triton"), "does not fit", "torch 2.11.0 as published"),
        ([("torch", "2.15.0+cpu"), ("triton", "4.0")], ("torch", "triton"), "unknown", "no metadata"),
        ([("jax", "0.10.2", 'libtpu==0.0.42.*; extra == "tpu"'), ("libtpu", "0.0.52")], ("jax", "libtpu"), "fits", "own tests"),
        ([("jax", "0.10.2", 'libtpu==0.0.42.*; extra == "tpu"'), ("libtpu", "0.0.42.1")], ("jax", "libtpu"), "fits", "metadata of jax"),
        ([("jax", "0.10.3", 'libtpu==0.0.42.*; extra == "tpu"'), ("libtpu", "0.0.52")], ("jax", "libtpu"), "does not fit", "metadata"),
        ([("jax", "0.10.3", 'libtpu==0.0.42.*; extra == "other"'), ("libtpu", "0.0.52")], ("jax", "libtpu"), "unknown", "no metadata"),
        ([("torch_tpu", "0.2.0", "torch>=2.11.0,<=2.15.0"), ("torch", "2.16.0")], ("torch-tpu", "torch"), "does not fit", "torch-tpu"),
        ([("torch_xla", "2.9.0"), ("torch", "2.9.1")], ("torch-xla", "torch"), "fits", "pytorch/xla"),
        ([("torch_xla", "2.9.0"), ("torch", "2.13.0")], ("torch-xla", "torch"), "does not fit", "pytorch/xla"),
        ([("torch-neuronx", "2.14.1.3"), ("torch", "2.14.0")], ("torch-neuronx", "torch"), "fits", "AWS Neuron SDK"),
        ([("torch-neuronx", "2.14.1.3"), ("torch", "2.13.0")], ("torch-neuronx", "torch"), "does not fit", "AWS Neuron SDK"),
        ([("torch-kdk", "0.1.0"), ("torch", "2.13.0"), ("nki", "0.5.0")], ("torch-kdk", "nki"), "unknown", "kdk's emulator"),
        ([("torch-kdk", "0.1.0"), ("torch", "2.13.0"), ("nki", "0.7.1")], ("torch-kdk", "nki"), "fits", "kdk's emulator"),
        ([("torch", "not a version"), ("triton", "3.9.0")], ("torch", "triton"), "unknown", "no version"),
    ],
)
def test_versions(packages: list[tuple[str, ...]], pair: tuple[str, str], expected: str, source: str, site: Site, tmp_path: Path) -> None:
    for name, version, *requires in [*packages, *([] if any(p[0] == "torch" for p in packages) else [("torch", "2.13.0")])]:
        site.add(name, version, *requires)
    code, report = env(tmp_path)
    fit = verdict(report, *pair)
    assert (fit["verdict"], bool(fit["way_out"])) == (expected, expected != "fits")
    assert re.search(source, fit["source"])
    verdicts = {f["verdict"] for f in report["versions"]}
    assert code == (1 if "does not fit" in verdicts else 3 if "unknown" in verdicts else 0)


def test_the_placeholders_on_pypi_are_absent(site: Site, tmp_path: Path) -> None:
    """Their import raises; nothing may try it, and nothing may count them as the vendor's."""
    site.add("torch", "2.14.0")
    site.add("nki", "0.0.1")
    site.add("torch-neuronx", "1.0")
    code, report = env(tmp_path)
    assert code == 0 and report["versions"] == []
    for name in ("nki", "torch-neuronx"):
        (tool,) = [t for t in report["toolchains"] if t["name"] == name]
        assert tool["state"] == "placeholder" and tool["get"].startswith(f"pip uninstall {name}") and "AWS Neuron" in tool["get"]


def test_the_emulator_is_not_the_vendors_nki(site: Site, tmp_path: Path) -> None:
    before = {n: m for n, m in sys.modules.items() if n == "nki" or n.startswith("nki.")}
    emulator.install()
    try:
        site.add("torch", "2.14.0")
        assert states(env(tmp_path)[1])["nki"] == "absent"
    finally:
        for name in [n for n in sys.modules if n == "nki" or n.startswith("nki.")]:
            del sys.modules[name]
        sys.modules.update(before)


def test_a_module_without_metadata_and_metadata_without_a_module(site: Site, tmp_path: Path) -> None:
    site.add("torch", "2.14.0")
    site.module("triton")
    code, report = env(tmp_path)
    assert code == 3 and states(report)["triton"] == "found"
    assert verdict(report, "torch", "triton")["packages"] == {"torch": "2.14.0", "triton": ""}
    site.add("jax", "0.10.2", module=None)
    code, report = env(tmp_path)
    assert code == 1 and states(report)["jax"] == "broken"
    (site.folder / "scipy").mkdir()  # an empty folder of that name is no package
    assert states(env(tmp_path)[1])["scipy"] == "absent"


def test_without_torch_kdk_does_nothing(site: Site, tmp_path: Path) -> None:
    code, report = env(tmp_path)
    assert code == 1 and states(report)["torch"] == "absent"


def test_the_other_project_called_kdk(site: Site, tmp_path: Path) -> None:
    site.add("torch", "2.14.0")
    site.add("kdk", "3.2.0", module=None, summary="Kodi skin validation tool")
    code, report = env(tmp_path)
    (other,) = report["other_kdk"]
    assert code == 1 and "another project (Kodi skin validation tool)" in other and "pip uninstall kdk" in other


def test_folders_called_kdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, shadow = tmp_path / "empty", tmp_path / "shadow"
    empty.mkdir()
    (shadow / "kdk").mkdir(parents=True)
    ours = str(KDK.parent)
    monkeypatch.setattr(sys, "path", [ours, str(shadow)])
    assert identity.others(KDK, str(empty)) == []
    assert identity.others(KDK, str(shadow)) == []  # a bare folder does not go before a package
    (shadow / "kdk" / "__init__.py").write_text("")
    assert identity.others(KDK, str(empty)) == []  # behind ours
    (other,) = identity.others(KDK, str(shadow))
    assert other.startswith(f"Python started in {shadow} imports `kdk` from {shadow / 'kdk'} instead of {KDK}")
    monkeypatch.setattr(sys, "path", [str(shadow), ours])
    (other,) = identity.others(KDK, str(empty))
    assert other.startswith("Python with this sys.path imports `kdk` from")
    (shadow / "kdk" / "__init__.py").unlink()
    monkeypatch.setattr(sys, "path", [])  # ours by an editable install: even a bare folder goes before
    assert "from " + str(shadow / "kdk") in identity.others(KDK, str(shadow))[0]


def test_the_command_line_under_another_kdk(tmp_path: Path) -> None:
    (tmp_path / "kdk").mkdir()
    (tmp_path / "kdk" / "__init__.py").write_text("SKIN = True")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "bench")])}
    command = [sys.executable, "-c", "from kdk_bench.cli import main; main(['env'])"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"kdk: [KDK-SHADOWED] `import kdk` finds another package: got {tmp_path / 'kdk' / '__init__.py'}")


def test_device_files(tmp_path: Path) -> None:
    for name in ("null", "nvidiactl", "vfio"):
        (tmp_path / name).mkdir()
    assert environment.device_files(tmp_path) == [] == environment.device_files(tmp_path / "absent")
    for name in ("nvidia0", "neuron0", "vfio/0"):
        (tmp_path / name).touch()
    assert environment.device_files(tmp_path) == ["cuda", "tpu", "neuron"]


def interpreter(tmp_path: Path, lines: str) -> str:
    """Something that answers in Python's place when it is asked for the devices."""
    script = tmp_path / "answers"
    script.write_text(f"#!/bin/sh\n{lines}\n")
    script.chmod(0o755)
    return str(script)


def test_devices(tmp_path: Path) -> None:
    assert environment.devices([], "never started") == ([], "")
    line = json.dumps([{"platform": "cuda", "index": 0, "name": "A GPU", "target": "sm_90"}])
    python = interpreter(tmp_path, f"echo a warning; echo '{line}'")
    assert environment.devices(["cuda"], python) == (json.loads(line), "")
    found, why = environment.devices(["cuda", "tpu"], python)
    assert len(found) == 1 and why == "device files of tpu are here, and torch reports none"
    found, why = environment.devices(["cuda"], interpreter(tmp_path, "echo the driver is too old >&2; kill -9 $$"))
    assert found == [] and why.endswith("torch could not be asked: the driver is too old")
    assert "torch could not be asked" in environment.devices(["cuda"], interpreter(tmp_path, "echo nonsense"))[1]


def test_a_device_that_torch_does_not_see_is_undetermined(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("torch", "2.14.0")
    monkeypatch.setattr(environment, "device_files", lambda: ["tpu"])
    monkeypatch.setattr(environment, "devices", lambda platforms: ([], f"{platforms} unseen"))
    code, report = env(tmp_path)
    assert code == 3 and report["undetermined"] == "['tpu'] unseen"


def test_torchs_own_answer_about_this_host() -> None:
    """The question itself runs; what it answers depends on the host."""
    found, why = environment.devices(["no such platform"])
    assert isinstance(found, list) and why == "device files of no such platform are here, and torch reports none"


def test_table() -> None:
    fit = versions.Fit({"torch": "2.9", "triton": ""}, "triton>=3", "unknown", "a source", "2026-01-01", "another version")
    tool = {"name": "jax", "version": None, "state": "absent", "purpose": "Pallas", "get": "pip install 'torch-kdk[jax]'"}
    device = {"platform": "cuda", "index": 0, "name": "A GPU", "target": "sm_90"}
    report = {"python": "3.11", "system": "Linux", "toolchains": [tool], "devices": [device], "undetermined": "a TPU"}
    console = Console(width=140, record=True)
    environment.table({**report, "versions": [fit.as_json()], "other_kdk": ["a folder"]}, console)
    text = console.export_text()
    for part in ("absent jax: pip install 'torch-kdk[jax]'", "cuda:0 A GPU sm_90", "unknown a TPU", "triton (no version)", "2026-01-01"):
        assert part in text
    assert "unknown torch, triton. Way out: another version" in text and "another kdk a folder" in text


def test_nothing_heavy_is_imported_to_answer(tmp_path: Path) -> None:
    code = """
import sys
from kdk_bench import cli, environment
environment.device_files = list
try:
    cli.main(["env"])
except SystemExit:
    pass
heavy = {"torch", "triton", "jax", "jaxlib", "libtpu", "numpy", "scipy", "ml_dtypes", "transformers", "nki", "torch_tpu", "torch_xla"}
print("HEAVY", sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("HEAVY []")


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    pinned = {versions.canonical(name): version for name, version in pinned.items()}
    assert {name: pinned[name] for name in versions.TESTED} == versions.TESTED


def test_every_line_of_the_table_has_a_source_and_a_date() -> None:
    assert all(known.source and re.fullmatch(r"20\d\d-\d\d-\d\d", known.date) for known in versions.KNOWN)
