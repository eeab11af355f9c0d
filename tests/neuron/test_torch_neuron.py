"""What needs a process of its own: the stand-ins of `vendor/` in the place of the vendor's packages, and the device "neuron".

A process holds one PrivateUse1 back end, under one name, and one package called nki.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def python(first: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter that finds packages in `first` before all others."""
    path = os.pathsep.join([str(first), *(str(ROOT / d) for d in ("bindings", "kernels", "bench")), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, text=True, capture_output=True, check=False)


def test_with_the_stand_ins(tmp_path: Path) -> None:
    """The tests of on_device.py and with_vendor_nki.py, in one process."""
    report, files = tmp_path / "report.xml", [str(HERE / "on_device.py"), str(HERE / "with_vendor_nki.py")]
    done = python(HERE / "vendor", "-m", "pytest", *files, f"--junitxml={report}")
    if done.returncode:
        pytest.fail(done.stdout[-8000:] + done.stderr[-2000:], pytrace=False)
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None and int(suite.attrib["tests"]) >= 22 and suite.attrib["skipped"] == "0"


def test_the_placeholder_counts_as_absent(tmp_path: Path) -> None:
    """The package called nki on PyPI raises when it is imported: the emulator runs, and a device has nothing to run on."""
    (tmp_path / "nki").mkdir()
    (tmp_path / "nki" / "__init__.py").write_text("raise ImportError('get the real one from the vendor')")
    code = """
        import torch
        import kdk.ops
        from kdk.backends.nki import emulator, launch

        with kdk.strict(), kdk.simulate("trn2"), kdk.record() as r:
            kdk.ops.rms_norm(torch.randn(2, 8), torch.randn(8), 1e-5)
        import nki
        print(r)
        print(emulator.is_emulator(nki), launch.missing("cpu"), "nki is not installed" in launch.missing("neuron"))
    """
    done = python(tmp_path, "-c", textwrap.dedent(code))
    assert done.stdout == "rms_norm.forward: nki simulated as trn2 x1\nTrue None True\n", done.stdout + done.stderr
