"""Rules of the repository: which package may import which, file length, what `import kdk` brings, packaging."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {"kdk": ROOT / "bindings/kdk", "kdk_kernels": ROOT / "kernels/kdk_kernels", "kdk_bench": ROOT / "bench/kdk_bench"}
MAY_IMPORT = {"kdk": {"kdk"}, "kdk_kernels": {"kdk", "kdk_kernels"}, "kdk_bench": {"kdk", "kdk_bench"}}
PYTHON = sorted(p for folder in ("bindings", "kernels", "bench", "tests", "benchmarks") for p in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("package", SOURCES)
def test_imports_go_one_way(package: str) -> None:
    for path in SOURCES[package].rglob("*.py"):
        mine = {name.partition(".")[0] for name in imported(path)} & set(SOURCES)
        assert mine <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {mine - MAY_IMPORT[package]}"


def test_files_stay_under_400_lines() -> None:
    long = {str(p.relative_to(ROOT)): n for p in PYTHON if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_kdk_brings_no_torch_and_no_operator() -> None:
    assert python("import sys, kdk; print([m for m in ('torch', 'numpy', 'kdk_kernels', 'triton', 'jax') if m in sys.modules])") == "[]\n"


def test_import_kdk_ops_brings_no_kernel_language() -> None:
    heavy = "('triton', 'jax', 'nki', 'transformers', 'scipy', 'ml_dtypes', 'rich', 'click', 'torch._dynamo', 'torch._inductor')"
    code = f"import sys, torch; before = set(sys.modules); import kdk.ops; print([m for m in {heavy} if m in sys.modules and m not in before])"
    assert python(code) == "[]\n"


def test_the_emulator_of_nki_imports_without_torch() -> None:
    code = "import sys; from kdk.backends.nki import emulator; emulator.install(); print('torch' in sys.modules)"
    assert python(code) == "False\n"


def test_a_package_named_kernels_is_found_from_the_root(tmp_path: Path) -> None:
    """transformers imports a package `kernels`; the folder of that name at the root must not hide it."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("OTHER = True\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.OTHER)"
    assert python(code) == "True\n"


@pytest.mark.parametrize("package", SOURCES)
def test_packages_are_typed(package: str) -> None:
    assert (SOURCES[package] / "py.typed").exists()


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
