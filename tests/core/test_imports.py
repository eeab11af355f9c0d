"""What an import brings along, and which way imports go."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {name: ROOT / root / name for root, name in (("bindings", "kdk"), ("kernels", "kdk_kernels"), ("bench", "kdk_bench"))}


def python(code: str, **environment: str) -> str:
    """Standard output of the code, run at the repository's root."""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def added(first: str, then: str) -> set[str]:
    """The modules that the second import adds to those of the first."""
    after = "import json; print(json.dumps(sorted(set(sys.modules) - before)))"
    return set(json.loads(python(f"import sys; {first}\nbefore = set(sys.modules)\n{then}\n{after}")))


def top(modules: set[str]) -> set[str]:
    return {m.partition(".")[0] for m in modules} - set(sys.stdlib_module_names) - {"__mp_main__"}


def test_kdk_imports_no_torch_and_no_operator() -> None:
    assert top(added("", "import kdk, kdk.recording, kdk.registry")) == {"kdk"}


def test_kdk_ops_imports_torch_and_nothing_heavier() -> None:
    modules = added("import torch", "import kdk.ops")
    assert top(modules) <= {"kdk", "kdk_kernels", "torch"}
    heavy = ("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "torch.distributed", "torch.export")
    assert [m for m in modules if m.startswith(heavy)] == []
    assert [m for m in modules if m.endswith((".simulate", ".compile", ".emulator"))] == []


def test_calling_an_operator_on_a_cpu_imports_no_kernel_language() -> None:
    call = "import kdk.ops; kdk.ops.rms_norm(torch.randn(2, 4, requires_grad=True), torch.ones(4), 1e-5).sum().backward()"
    assert top(added("import torch", call)) <= {"kdk", "kdk_kernels", "torch"}


def test_the_emulator_imports_no_torch() -> None:
    assert "torch" not in top(added("", "import kdk.backends.nki.emulator"))


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, and whether that happens when the file is imported."""
    tree = ast.parse(path.read_text())
    late = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_type_checking(scope)
        for node in ast.walk(scope)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((f"{node.module}.{alias.name}", id(node) not in late) for alias in node.names)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize(
    ("package", "forbidden"), [("kdk", ("kdk_kernels", "kdk_bench")), ("kdk_kernels", ("kdk_bench",)), ("kdk_bench", ())]
)
def test_imports_go_one_way(package: str, forbidden: tuple[str, ...]) -> None:
    """kdk_kernels -> kdk <- kdk_bench: kdk and kdk_bench know the operators by their declarations alone."""
    files = list(SOURCES[package].rglob("*.py"))
    assert files
    found = {(str(f.relative_to(ROOT)), name) for f in files for name, _ in imported(f) if name.partition(".")[0] in forbidden}
    assert found == set()


CONTRACT = {
    "patterns": ("kdk.patterns.", "kdk.ops"),
    "peers.py": ("kdk.peers.",),
    "reference.py": ("kdk.rounding.",),
    "algorithm": ("kdk.rounding.",),
    "pallas": ("kdk.backends.pallas.",),
    "nki": ("kdk.backends.nki.launch.", "kdk.layouts."),
    "triton": ("kdk.layouts.",),
    "": ("kdk.Op", "kdk.errors.", "kdk.cases.", "kdk.compare."),
}
"""How a file's name begins -> what it may import of kdk; "": every file."""


@pytest.mark.parametrize("file", sorted(SOURCES["kdk_kernels"].rglob("*.py")), ids=lambda f: f"{f.parent.name}/{f.name}")
def test_an_operator_imports_of_kdk_only_what_it_may(file: Path) -> None:
    allowed = tuple(name for start, names in CONTRACT.items() if file.name.startswith(start) for name in names)
    found = {name for name, _ in imported(file) if name.partition(".")[0] == "kdk"}
    assert {name for name in found if not name.startswith(allowed)} == set()


LANGUAGES = ("triton", "jax", "jaxlib", "nki", "neuronxcc", "ml_dtypes", "scipy")


def test_a_kernel_language_is_imported_where_it_is_used() -> None:
    """Outside the back ends and the operators' kernel files, and in every launch.py, only inside functions.

    kdk.jax is for users of jax, and nothing of kdk imports it.
    """
    mine = [f for f in SOURCES["kdk"].glob("*.py") if f.name != "jax.py"]
    for f in [*mine, *SOURCES["kdk"].glob("backends/*.py"), *SOURCES["kdk"].glob("backends/*/launch.py")]:
        at_import = {name.partition(".")[0] for name, now in imported(f) if now}
        assert at_import.isdisjoint(LANGUAGES), f


@pytest.mark.parametrize("package", SOURCES)
def test_types_are_announced(package: str) -> None:
    assert (SOURCES[package] / "py.typed").exists()


def test_the_folder_kernels_hides_no_package_of_that_name(tmp_path: Path) -> None:
    """At the repository's root `kernels` is a folder without __init__.py, which any real package goes before."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("VALUE = 'the real one'")
    paths = os.pathsep.join([*(str(p.parent) for p in SOURCES.values()), str(tmp_path)])
    assert python("import kernels; print(kernels.VALUE)", PYTHONPATH=paths) == "the real one\n"
