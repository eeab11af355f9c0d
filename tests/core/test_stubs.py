"""kdk/ops.pyi says what the operators' references say, and a type checker holds users to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Optional

import pytest
import torch
from torch import Tensor

from kdk import Op
from kdk_bench import stubs

ROOT = Path(__file__).parents[2]


def test_the_stub_is_up_to_date() -> None:
    assert stubs.STUB.read_text() == stubs.text(), "stale: run `python -m kdk_bench.stubs`"


def test_what_the_stub_says() -> None:
    text = stubs.text()
    assert "def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:\n" in text
    assert "def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:\n" in text
    assert '    """Root-mean-square normalisation over the last dimension."""\n' in text


def test_annotations() -> None:
    def odd(x: Tensor, y: Optional[Tensor], sizes: list[int], z: int | None = None, name: str = "a\n") -> Tensor:
        r'''A \ and """.'''
        return x

    op = Op(reference=odd, check=lambda x: None, outputs=("o",), shapes={"x": "N", "y": "N", "o": "N"}, kind="row")
    lines = stubs._function(op)
    expected = "def odd(x: Tensor, y: Tensor | None, sizes: list[int], z: int | None = None, name: str = 'a\\n') -> Tensor:"
    assert expected in lines
    namespace: dict[str, object] = {"Tensor": torch.Tensor}
    exec(lines, namespace)  # it is Python, its docstring included
    assert namespace["odd"].__doc__ == r'A \ and """.'


PROGRAMS = {
    "right": ("y: Tensor = kdk.ops.rms_norm(x, x, 1e-6, offset=1.0)", ""),
    "a misspelt operator": ("kdk.ops.rms_nrom(x, x, 1e-6)", 'Module has no attribute "rms_nrom"; maybe "rms_norm"?'),
    "a missing argument": ("kdk.ops.rms_norm(x, x)", 'Missing positional argument "eps" in call to "rms_norm"'),
    "a wrong type": ("kdk.ops.rms_norm(x, x, '1e-6')", 'Argument 3 to "rms_norm" has incompatible type "str"'),
    "two results": ("q: Tensor = kdk.ops.rope(x, x, x, x)", "Incompatible types in assignment"),
}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says about all the programs, in one run."""
    folder = tmp_path_factory.mktemp("programs")
    for name, (line, _) in PROGRAMS.items():
        (folder / f"{name.replace(' ', '_')}.py").write_text(f"import kdk.ops\nfrom torch import Tensor\nx = Tensor()\n{line}\n")
    paths = os.pathsep.join(str(ROOT / root) for root in ("bindings", "kernels", "bench"))
    config = folder / "mypy.ini"
    config.write_text("[mypy]\nfollow_imports = silent\n")
    (folder / "torch").mkdir()  # in torch's place, whose own types cost mypy far more than these programs
    (folder / "torch" / "__init__.pyi").write_text("class Tensor: ...\nclass dtype: ...\nint8: dtype\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(folder / "cache"), "."]
    env = {**os.environ, "MYPYPATH": paths}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=env).stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_mypy_on(name: str, complaints: str) -> None:
    expected = PROGRAMS[name][1]
    mine = [c for c in complaints.splitlines() if c.startswith(f"{name.replace(' ', '_')}.py:4: error")]
    assert len(mine) == bool(expected) and all(expected in c for c in mine), complaints
    assert f"Found {sum(bool(e) for _, e in PROGRAMS.values())} errors" in complaints
