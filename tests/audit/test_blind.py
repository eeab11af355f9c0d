"""What goes past the dispatcher is found and named with its line; what only looks so is not."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from kdk_bench.audit import audit, blind, support
from kdk_bench.audit.running import from_factory, run

MODEL = """
import ctypes
import numpy
import torch
import triton
import triton.language as tl
import mylib
from torch import nn

@triton.jit
def double(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, i < n) * 2, i < n)

@triton.autotune(configs=[triton.Config({"B": 64}), triton.Config({"B": 128})], key=["n"])
@triton.jit
def tuned(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, i < n) * 2, i < n)

@torch.library.custom_op("kdk_blind::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@twice.register_fake
def _(x):
    return torch.empty_like(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x)
        y = torch.empty_like(x)  # read
        double[(1,)](x, y, x.numel(), B=64)  # raw
        z = torch.empty_like(x)  # read
        tuned[(1,)](x, z, x.numel())  # raw
        x.detach().numpy()  # leaves
        numpy.asarray(x.detach())  # leaves
        x.tolist()  # leaves
        ctypes.c_void_p(x.data_ptr())  # leaves
        x = twice(x)  # outside
        x = mylib.get_reference_points(mylib.naive_scan(x))
        written = torch.empty(3)
        written[0] = 1.0
        written[1:] = 2.0
        out = torch.empty(2, 8)
        torch.add(x, x, out=out)
        filled = torch.empty(4).normal_().sum() + torch.empty(0).sum() + torch.empty(4).to(torch.float64).zero_().sum()
        return y * 2 + z + written.sum() + filled + out

def model():
    return Model(), (torch.randn(2, 8),), {}
"""
LIBRARY = """
import warnings

def get_reference_points(x):
    return x * 1

def naive_scan(x):
    warnings.warn("falling back to a slower implementation")
    return x.cumsum(-1)
"""


def audited(folder: Path, module: str, text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The report of the factory `model` in a module of this text; its folder is the current one."""
    (folder / f"{module}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    try:
        factory, files = from_factory(f"{module}:model")
        capture = run(factory, train=False).capture
    finally:
        sys.modules.pop(module, None)
    capture.files = files
    assert not capture.error
    return audit.report(capture, support.platforms(["tpu"], {}, {}, []), module)


def blind_spots(report: dict[str, Any]) -> dict[str, list[str]]:
    """What kind -> the lines."""
    found: dict[str, list[str]] = {}
    for f in report["findings"]:
        if f["kind"] == "blind":
            assert f["calls_per_step"] == 1 and f["line"] and not f["blocking"], f
            found.setdefault(f["says"].partition(":")[0], []).append(f["line"])
    return found


def test_what_goes_past_the_dispatcher_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    installed = tmp_path / "site-packages"
    (installed / "mylib").mkdir(parents=True)
    (installed / "mylib" / "__init__.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(installed))
    report = audited(tmp_path, "past_the_dispatcher", MODEL, monkeypatch)

    def lines(mark: str) -> set[str]:
        numbers = [i + 1 for i, line in enumerate(MODEL.splitlines()) if line.endswith(f"# {mark}")]
        return {f"past_the_dispatcher.py:{i}" for i in numbers}

    found = blind_spots(report)
    assert set(found.pop(blind.RAW)) == lines("raw") and set(found.pop(blind.UNWRITTEN)) == lines("read")
    assert set(found.pop(blind.LEFT)) == lines("leaves") and set(found.pop("kdk_blind")) == lines("outside")
    assert set(found.pop("a slow reference path")) == {"mylib/__init__.py:7", "mylib/__init__.py:8"} and not found
    ids = [f["id"] for f in report["findings"]]
    assert len(ids) == len(set(ids))


EXTENSION = """
#include <Python.h>
static PyObject *twice(PyObject *self, PyObject *x) { return PyNumber_Add(x, x); }
static PyMethodDef methods[] = {{"twice", twice, METH_O, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kdk_test_extension", NULL, -1, methods};
PyMODINIT_FUNC PyInit_kdk_test_extension(void) { return PyModule_Create(&module); }
"""
CALLS_IT = """
import kdk_test_extension
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return kdk_test_extension.twice(x * 1)  # here

def model():
    return Model(), (torch.randn(2, 8),), {}
"""


@pytest.mark.skipif(not shutil.which("gcc") or sys.platform != "linux", reason="it compiles a small extension with gcc")
@pytest.mark.parametrize("linked", [True, False])
def test_a_compiled_extension_is_named_where_it_is_called(linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "extension.c", tmp_path / "kdk_test_extension.so"
    source.write_text(EXTENSION)
    command = ["gcc", "-shared", "-fPIC", f"-I{sysconfig.get_paths()['include']}", str(source), "-o", str(library)]
    if linked:
        command += [f"-L{Path(torch.__file__).parent / 'lib'}", "-Wl,--no-as-needed", "-lc10"]
    subprocess.run(command, check=True, capture_output=True)
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "kdk_test_extension", raising=False)
    name = f"calls_extension_{linked}".lower()
    found = blind_spots(audited(tmp_path, name, CALLS_IT, monkeypatch))
    number = next(i for i, line in enumerate(CALLS_IT.splitlines(), 1) if line.endswith("# here"))
    assert found == ({blind.EXTENSION: [f"{name}.py:{number}"]} if linked else {})
    assert sys.getprofile() is None
