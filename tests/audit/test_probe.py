"""The half-hour kit: the emitted script on this machine's CPU, and on a fake back end that falls back, raises or answers wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kdk_bench.audit.audit import SCHEMA
from kdk_bench.cli import main

MODEL = "tests.audit.models:llama"
DEVICE = "privateuseone"


def audit(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["audit", MODEL, *arguments])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kit")
    audit("--target", "neuron", "--emit-probe", str(folder))
    return folder


def test_the_script_measures_every_operator_on_the_cpu(kit: Path, tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    command = [sys.executable, str(kit / "probe.py"), "--device", "cpu", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["schema"] == "kdk.probe/1" and report["platform"] == "cpu" and "torch" in report["versions"]
    outcomes = {row["op"]: row["outcome"] for row in report["ops"]}
    assert outcomes["aten::arange"] == "native"  # its device is a keyword of its own
    assert outcomes["aten::mm"] == outcomes["aten::rsqrt"] == outcomes["aten::embedding"] == "native"
    assert sum(r["outcome"] == "native" for r in report["ops"]) >= 0.9 * len(report["ops"]), report["ops"]
    assert all(r["seconds"] > 0 for r in report["ops"] if r["outcome"] == "native")
    assert "import kdk" not in (kit / "probe.py").read_text()


def test_a_second_run_goes_on_where_the_first_ended(kit: Path, tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    command = [sys.executable, str(kit / "probe.py"), "--device", "cpu", "--out", str(out), "--seconds"]
    first = subprocess.run([*command, "0"], capture_output=True, text=True, check=True)
    assert "left for another run" in first.stdout and json.loads(out.read_text())["ops"] == []
    second = subprocess.run([*command, "600"], capture_output=True, text=True, check=True)
    assert "left for" not in second.stdout


def load_probe(kit: Path) -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("probe_under_test", kit / "probe.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_falling_back_raising_and_answering_wrongly_are_told_apart(kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A back end that misbehaves stands in for the device: the calls that the script makes on it go through this mode."""
    import warnings

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    probe = load_probe(kit)

    real = torch._ops.OpOverload.__call__

    class Fake(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name
            if name == "aten::silu":
                warnings.warn("aten::silu is not implemented for 'fake': falling back to run on the CPU", stacklevel=2)
            if name == "aten::rsqrt":
                raise NotImplementedError("aten::rsqrt: not implemented for fake")
            out = real(func, *args, **(kwargs or {}))
            return out * 1.5 if name == "aten::mm" else out

    original = probe.moved
    state = {"device": None}

    def moved(value: Any, device: Any) -> Any:
        """The script moves arguments to the device just before it calls there."""
        state["device"] = device
        return original(value, "cpu")

    monkeypatch.setattr(probe, "moved", moved)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if state["device"] == DEVICE:
            with Fake():
                return real(self, *args, **kwargs)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch._ops.OpOverload, "__call__", call)
    monkeypatch.setattr(probe, "wait", lambda device: None)
    rows = {}
    for row in probe.OPERATORS:
        state["device"] = None
        result = probe.measure(row, DEVICE, dict)
        rows[result["op"]] = result
    monkeypatch.undo()
    assert rows["aten::silu"]["outcome"] == "fallback" and "falling back" in rows["aten::silu"]["detail"]
    assert rows["aten::rsqrt"]["outcome"] == "error" and "not implemented" in rows["aten::rsqrt"]["detail"]
    assert rows["aten::mm"]["outcome"] == "wrong" and "differs" in rows["aten::mm"]["detail"]
    assert rows["aten::mul.Tensor"]["outcome"] == "native"
    evidence = tmp_path / "probe.json"
    head = {"schema": "kdk.probe/1", "platform": "neuron", "device": "fake", "versions": "none", "date": "2026-01-01"}
    evidence.write_text(json.dumps({**head, "ops": list(rows.values())}))
    file = tmp_path / "report.json"
    assert audit("--target", "neuron", "--evidence", str(evidence), "--json", str(file)) == 1
    report = json.loads(file.read_text())
    assert report["schema"] == SCHEMA
    support = {op["op"]: op["support"]["neuron"] for op in report["ops"]}
    assert (support["aten::silu"]["status"], support["aten::silu"]["evidence"]) == ("host", "measured")
    assert support["aten::rsqrt"]["status"] == "error" and support["aten::mm"]["status"] == "error"
    assert support["aten::mul"]["status"] == "native" and "probe on fake" in support["aten::mul"]["source"]
    assert {f["op"] for f in report["findings"] if f["kind"] == "missing"} == {"aten::rsqrt", "aten::mm"}
    (host,) = [f for f in report["findings"] if f["kind"] == "fallback"]
    assert host["op"] == "aten::silu" and host["cost"]["evidence"] == "measured"
