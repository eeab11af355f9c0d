"""Rules of the repository: length of files, and what the wheel holds."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {"kdk": ROOT / "bindings/kdk", "kdk_kernels": ROOT / "kernels/kdk_kernels", "kdk_bench": ROOT / "bench/kdk_bench"}
PYTHON = sorted(p for folder in ("bindings", "kernels", "bench", "tests", "benchmarks") for p in (ROOT / folder).rglob("*.py"))


def test_files_stay_under_400_lines() -> None:
    long = {str(p.relative_to(ROOT)): n for p in PYTHON if (n := len(p.read_text().splitlines())) > 400}
    assert not long


@pytest.mark.slow
def test_the_wheel_is_complete_and_typed(tmp_path: Path) -> None:
    """The built wheel, unpacked elsewhere: every module is in it, and mypy accepts it and a program that uses it."""
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT], check=True, capture_output=True)
    wheel = next(tmp_path.glob("*.whl"))
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    for package, folder in SOURCES.items():
        inside = {p.relative_to(site / package) for p in (site / package).rglob("*.py")}
        assert inside == {p.relative_to(folder) for p in folder.rglob("*.py")}
        assert (site / package / "py.typed").exists()
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nmypy_path = " + str(site) + "\n[mypy-triton.*,jax.*,nki.*,transformers.*]\nignore_missing_imports = True\n")
    program = tmp_path / "program.py"
    program.write_text("import kdk\nwith kdk.use('reference'), kdk.record() as r:\n    print(r.rows)\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
