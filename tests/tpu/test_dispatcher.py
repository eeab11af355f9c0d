"""The dispatcher of the installed torch_tpu, against what `kdk audit` says of TorchTPU: `make test-tpu`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kdk_bench.audit import support

pytest.importorskip("torch_tpu", reason="make test-tpu installs it beside the environment")


@pytest.fixture(scope="module")
def live() -> dict[str, object]:
    command = [sys.executable, "-m", "kdk_bench.audit.tables.dispatcher", "torch_tpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_the_shipped_table_is_what_this_version_says(live: dict[str, object]) -> None:
    shipped = json.loads((support.TABLES / "torch_tpu.json").read_text())
    assert live["version"] == shipped["version"], "write the table again: see docs/audit.md"
    assert live["ops"] == shipped["ops"]


def test_nothing_is_native_that_the_dispatcher_refuses(live: dict[str, object]) -> None:
    """Asked a second way, per operator: the kernel that the dispatcher computed for the key is the plugin's own."""
    ops = live["ops"]
    assert isinstance(ops, dict)
    names = sorted({*ops["native"], *(n for n, to in ops["structured"].items() if to in ops["native"])})
    platform = support.platforms(["tpu"], {}, {}, [])[0]
    code = """
import json, sys, torch
from torch_tpu import _loader
_loader._init_device("tpu")
names, structured = json.loads(sys.stdin.read())
has = torch._C._dispatch_has_kernel_for_dispatch_key
refused = [n for n in names if not (has(n, "PrivateUse1") or has(n, "AutogradPrivateUse1") or has(structured.get(n, n), "PrivateUse1"))]
print("REFUSED" + json.dumps(refused))
"""
    given = json.dumps([[n for n in names if platform.of(n).status == "native"], ops["structured"]])
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.partition("REFUSED")[2]) == []
