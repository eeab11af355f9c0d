"""`kdk env`: toolchains, devices, and whether their versions fit together. Imports none of them to answer."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kdk_bench import identity, versions
from kdk_bench.records import today
from kdk_bench.versions import DOES_NOT_FIT, FITS, UNKNOWN

FOUND, ABSENT, PLACEHOLDER, BROKEN = "found", "absent", "placeholder", "broken"
NEURON_GUIDE = "the AWS Neuron documentation, 'Set up environments' (awsdocs-neuron.readthedocs-hosted.com)"


@dataclass(frozen=True)
class Toolchain:
    """A package that kdk can use. name: of its distribution, canonical. placeholder: versions on PyPI that hold nothing."""

    name: str
    module: str
    purpose: str
    get: str
    placeholder: str = ""


TOOLCHAINS = (
    Toolchain("torch-kdk", "kdk", "kdk itself", "pip install torch-kdk"),
    Toolchain("torch", "torch", "everything", "pip install torch"),
    Toolchain("numpy", "numpy", "everything", "pip install numpy"),
    Toolchain("triton", "triton", "Triton kernels, on a GPU and simulated", "pip install 'torch-kdk[triton]'"),
    Toolchain("ml-dtypes", "ml_dtypes", "simulators: exact number formats", "pip install 'torch-kdk[triton]' or 'torch-kdk[neuron]'"),
    Toolchain("scipy", "scipy", "simulators: special functions", "pip install 'torch-kdk[triton]'"),
    Toolchain("jax", "jax", "Pallas kernels, on a TPU and simulated", "pip install 'torch-kdk[jax]'"),
    Toolchain("libtpu", "libtpu", "compiling for TPUs, also on a host without one", "pip install 'torch-kdk[tpu]'"),
    Toolchain("torch-tpu", "torch_tpu", "torch on a TPU", "pip install torch_tpu, on a host with a TPU"),
    Toolchain("torch-xla", "torch_xla", "torch on a TPU, the older way", "not needed with torch_tpu; its latest, 2.9, wants torch 2.9"),
    Toolchain("nki", "nki", "NKI kernels on Trainium; without it kdk's emulator", f"not on PyPI: see {NEURON_GUIDE}", "<0.3"),
    Toolchain("torch-neuronx", "torch_neuronx", "torch on Trainium", f"not on PyPI: see {NEURON_GUIDE}", "==1.0"),
    Toolchain("transformers", "transformers", "kdk.patch of Hugging Face's models", "pip install transformers"),
)

PROBE = """
import json, torch
found = []
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    chip = p.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{p.major}{p.minor}"
    found.append({"platform": "cuda", "index": i, "name": p.name, "target": chip})
accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
if accelerator is not None and accelerator.type != "cuda":
    for i in range(torch.accelerator.device_count()):
        found.append({"platform": accelerator.type, "index": i, "name": "", "target": ""})
print(json.dumps(found))
"""


def _spec(module: str) -> Any:
    """Where an import would find a module, without importing it, whatever stands in sys.modules (kdk's emulator for nki)."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(module, None) if find else None
        if spec is not None and spec.origin is not None:  # a folder without __init__.py has no origin
            return spec
    return None


def toolchains() -> list[dict[str, Any]]:
    """Every toolchain with its version and state."""
    result = []
    for tool in TOOLCHAINS:
        try:
            there: str | None = version(tool.name)
        except PackageNotFoundError:
            there = None
        state = FOUND if _spec(tool.module) else BROKEN if there else ABSENT
        if there and tool.placeholder and there in SpecifierSet(tool.placeholder):
            state = PLACEHOLDER
        get = f"pip uninstall {tool.name}: a placeholder; {tool.get}" if state == PLACEHOLDER else tool.get
        if state == BROKEN:
            get = f"its distribution is installed and `{tool.module}` is not to be found: pip install --force-reinstall {tool.name}"
        entry = {"name": tool.name, "module": tool.module, "version": there, "state": state, "purpose": tool.purpose}
        result.append({**entry, "get": "" if state == FOUND else get})
    return result


def device_files(root: Path = Path("/dev")) -> list[str]:
    """The platforms whose device files the host has. Their names come from the drivers."""
    there = {p.name for p in root.iterdir()} if root.is_dir() else set()
    vfio = root / "vfio"
    signs = {
        "cuda": any(n.startswith("nvidia") and n[6:].isdigit() for n in there) or bool(there & {"kfd", "dxg"}),
        "tpu": any(n.startswith("accel") for n in there) or (vfio.is_dir() and any(vfio.iterdir())),
        "neuron": any(n.startswith("neuron") for n in there),
    }
    return [name for name, sign in signs.items() if sign]


def devices(platforms: list[str], python: str = sys.executable) -> tuple[list[dict[str, Any]], str]:
    """What torch reports, and why that is not all of `platforms`, or "". Torch is asked only on a host with device files, and
    in a process of its own: a back end that loads may abort it."""
    if not platforms:
        return [], ""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    try:
        done = subprocess.run([python, "-c", PROBE], env=env, capture_output=True, text=True, timeout=180, check=False)
        found = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        found, why = None, f"{type(error).__name__}: {error}"
    if found is None:
        return [], f"device files of {', '.join(platforms)} are here, and torch could not be asked: {why}"
    left = [p for p in platforms if p not in {d["platform"] for d in found}]
    return found, f"device files of {', '.join(left)} are here, and torch reports none" if left else ""


def report() -> dict[str, Any]:
    """The report `kdk.env/1`."""
    import kdk

    tools = toolchains()
    found = {t["name"]: t["version"] or "" for t in tools if t["state"] == FOUND}
    there, undetermined = devices(device_files() if "torch" in found else [])
    return {
        "schema": "kdk.env/1",
        "date": today(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "toolchains": tools,
        "devices": there,
        "undetermined": undetermined,
        "versions": [fit.as_json() for fit in versions.fits({**found, "python": platform.python_version()})],
        "other_kdk": identity.others(Path(kdk.__file__).parent),
    }


def exit_code(found: Mapping[str, Any]) -> int:
    """0 holds, 1 what was found does not fit together, 3 something could not be determined."""
    verdicts = {fit["verdict"] for fit in found["versions"]}
    broken = any(t["state"] == BROKEN or (t["name"] == "torch" and t["state"] == ABSENT) for t in found["toolchains"])
    if DOES_NOT_FIT in verdicts or broken or found["other_kdk"]:
        return 1
    return 3 if UNKNOWN in verdicts or found["undetermined"] else 0


COLOURS = {FITS: "green", DOES_NOT_FIT: "red", UNKNOWN: "yellow", FOUND: "green", BROKEN: "red", PLACEHOLDER: "yellow", ABSENT: "dim"}


def _coloured(word: str) -> str:
    return f"[{COLOURS[word]}]{word}[/]"


def table(found: Mapping[str, Any], console: Console) -> None:
    """Toolchains, devices, versions that fit or not, and what else is called kdk."""
    console.print(f"Python {found['python']} on {found['system']}")
    tools = Table(title="toolchains", title_justify="left")
    for column in ("package", "version", "state", "for"):
        tools.add_column(column, overflow="fold")
    for t in found["toolchains"]:
        tools.add_row(t["name"], t["version"] or "", _coloured(t["state"]), escape(t["purpose"]))
    console.print(tools)
    for t in found["toolchains"]:
        if t["get"]:
            console.print(f"{_coloured(t['state'])} {t['name']}: {escape(t['get'])}", soft_wrap=True)
    for d in found["devices"]:
        console.print(f"device {d['platform']}:{d['index']} {escape(d['name'])} {d['target']}")
    if not found["devices"] and not found["undetermined"]:
        console.print("no accelerator: kernels run in their simulators here")
    if found["undetermined"]:
        console.print(f"[yellow]{UNKNOWN}[/] {escape(found['undetermined'])}")
    fits = Table(title="versions that were found together", title_justify="left")
    for column in ("packages", "wanted", "verdict", "source", "date"):
        fits.add_column(column, overflow="fold")
    for fit in found["versions"]:
        packages = ", ".join(f"{name} {number or '(no version)'}" for name, number in fit["packages"].items())
        fits.add_row(packages, fit["wants"], _coloured(fit["verdict"]), escape(fit["source"]), fit["date"])
    console.print(fits)
    for fit in found["versions"]:
        if fit["way_out"]:
            names = ", ".join(fit["packages"])
            console.print(f"{_coloured(fit['verdict'])} {names}. Way out: {escape(fit['way_out'])}", soft_wrap=True)
    for other in found["other_kdk"]:
        console.print(f"[red]another kdk[/] {escape(other)}", soft_wrap=True)
