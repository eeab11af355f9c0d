"""Operators of other people: installed packages that announce theirs, and `--ops DIR`. What is wrong with one is said in one
line, and costs the others nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kdk_bench import cli

REFERENCE = """
import torch
from torch import Tensor

def {name}(x: Tensor, times: float) -> Tensor:
    \"\"\"x times a number.\"\"\"
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * times).to(x.dtype)

def check(x: Tensor, times: float) -> None: ...
"""
DECLARATION = """
from kdk import Op
from . import reference

op = Op(
    reference=reference.{name}, check=reference.check, kind="elementwise", outputs=("y",),
    shapes={{"x": "*N H", "y": "*N H"}}, dtypes=("float32",),
)
"""
CASES = """
from kdk.cases import Case, Cases, Dim

CASES = Cases(dims={"N": Dim(), "H": Dim()}, scalars={"times": (3.0,)}, models=(Case("a model", {"N": 8, "H": 64}),))
"""


def operator(path: Path, name: str = "", *, reference: str = REFERENCE, declaration: str = DECLARATION, cases: str = CASES) -> Path:
    """An operator's folder."""
    path.mkdir(parents=True)
    (path / "reference.py").write_text(reference.format(name=name or path.name))
    (path / "__init__.py").write_text(declaration.format(name=name or path.name))
    (path / "cases.py").write_text(cases)
    return path


def announce(site: Path, package: str, distribution: str) -> Path:
    """What pip leaves of a distribution that announces `package`; returns the package's folder."""
    info = site / f"{distribution}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kdk.ops]\n{distribution} = {package}\n")
    return site / package


def python(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, check=False)


EVERYTHING = """
import torch, kdk.ops
from kdk_bench import cli
print(kdk.ops.provided_times(torch.ones(2, 2), 3.0).tolist(), kdk.ops.rms_norm.__name__)
for words in (["list", "--json", "list.json"], ["check", "provided_times", "--quick", "--jobs", "0", "--json", "check.json"]):
    try:
        cli.main([words[0], *words[1:-1], SITE + "/" + words[-1]])
    except SystemExit as done:
        print(words[0], "exits with", done.code)
"""


def test_an_installed_package(tmp_path: Path) -> None:
    """kdk.ops has its operator, kdk list shows it, kdk check checks it."""
    package = announce(tmp_path, "good_ops", "good-distribution")
    operator(package / "provided_times")
    (package / "__init__.py").write_text("")
    done = python(tmp_path, f"SITE = {str(tmp_path)!r}\n{EVERYTHING}")
    assert done.returncode == 0, done.stderr
    assert "[[3.0, 3.0], [3.0, 3.0]] rms_norm" in done.stdout
    assert "list exits with 0" in done.stdout and "check exits with 0" in done.stdout
    assert "Warning" not in done.stderr
    listed = {op["name"]: op for op in json.loads((tmp_path / "list.json").read_text())["ops"]}
    assert listed["provided_times"]["summary"] == "x times a number." and "rms_norm" in listed
    results = json.loads((tmp_path / "check.json").read_text())["results"]
    reference = [r["outcome"] for r in results if r["implementation"] == "reference"]
    assert len(reference) > 10 and set(reference) == {"passed"}
    assert {r["outcome"] for r in results if r["implementation"] != "reference"} == {"refused"}


def test_broken_packages_and_folders_cost_nobody_else(tmp_path: Path) -> None:
    package = announce(tmp_path, "mixed_ops", "mixed")
    package.mkdir()
    (package / "__init__.py").write_text("")
    operator(package / "a_raises", declaration="raise RuntimeError('no licence')  # {name}")
    operator(package / "b_syntax", reference="def {name}(x: Tensor\n")
    operator(package / "c_undeclared", declaration="")
    operator(package / "d_untyped", reference="def {name}(x):\n    return x\n\ndef check(x): ...\n")
    operator(package / "e_rival", "rms_norm")
    operator(package / "f_twice", "provided_times")
    operator(package / "g_good", "provided_good")
    other = announce(tmp_path, "another_ops", "another")
    operator(other / "provided_times")
    (other / "__init__.py").write_text("")
    announce(tmp_path, "absent_ops", "absent")
    code = "import kdk.ops, kdk.registry as r; print({n: o.op.package for n, o in r.OPERATORS.items()})"
    done = python(tmp_path, code)
    assert done.returncode == 0, done.stderr
    for there in ("'provided_good': 'mixed_ops.g_good'", "'provided_times': 'another_ops.provided_times'", "'rms_norm': 'kdk_kernels."):
        assert there in done.stdout
    warned = [line for line in done.stderr.splitlines() if "ProviderWarning" in line]
    for start, reason in (
        ("absent (absent_ops) announces kdk operators and", "ModuleNotFoundError: No module named 'absent_ops'"),
        ("mixed (mixed_ops): the operator in mixed_ops.a_raises", r"RuntimeError: no licence (__init__.py, line 1)"),
        ("mixed (mixed_ops): the operator in mixed_ops.b_syntax", "SyntaxError: '(' was never closed (reference.py, line 1)"),
        ("mixed (mixed_ops): the operator in mixed_ops.c_undeclared", "has no `op`"),
        ("mixed (mixed_ops): the operator in mixed_ops.d_untyped", "torch does not take the signatures"),
        ("mixed (mixed_ops): the operator in mixed_ops.e_rival", "got rms_norm in mixed_ops.e_rival; kdk_kernels.rms_norm has it"),
        ("mixed (mixed_ops): the operator in mixed_ops.f_twice", "provided_times in mixed_ops.f_twice; another_ops.provided_times has it"),
    ):
        (line,) = [line for line in warned if start in line]
        assert "cannot be loaded, and is left out: " in line and reason in line
    assert len(warned) == 7


def test_cases_of_an_installed_package_that_do_not_fit_fail_its_own_rows_alone(tmp_path: Path) -> None:
    package = announce(tmp_path, "caseless_ops", "caseless")
    (operator(package / "provided_caseless") / "cases.py").unlink()
    (package / "__init__.py").write_text("")
    code = (
        "from kdk_bench import cli; cli.main(['check', 'provided_caseless', 'silu_and_mul', '--implementation', 'reference',"
        f"'--dtype', 'float32', '--direction', 'forward', '--jobs', '0', '--json', {str(tmp_path / 'check.json')!r}])"
    )
    done = python(tmp_path, code)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    results = json.loads((tmp_path / "check.json").read_text())["results"]
    assert {r["outcome"] for r in results if r["op"] == "silu_and_mul"} == {"passed"}
    (failed,) = [r for r in results if r["op"] == "provided_caseless"]
    assert failed["outcome"] == "failed" and "cases.py of provided_caseless cannot be read: ModuleNotFoundError" in failed["reason"]


def check(directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and standard error of `kdk check --ops DIR`."""
    with pytest.raises(SystemExit) as done:
        cli.main(["check", "--ops", str(directory), "--implementation", "reference", "--jobs", "0"])
    return int(str(done.value.code)), capsys.readouterr().err


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out what a test registers."""
    import kdk.ops  # noqa: F401
    from kdk import registry

    monkeypatch.setattr(registry, "OPERATORS", dict(registry.OPERATORS))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


TWO_RESULTS = DECLARATION.replace("dtypes", 'saved=("s",), dtypes').replace(', "y"', ', "s": "N", "y"')
WRONG = {
    "without_init": ({}, "an operator's folder needs an __init__.py", "write one that says op = kdk.Op"),
    "syntax": ({"reference": "def {name}(x: Tensor\n"}, "got SyntaxError: '(' was never closed (reference.py, line 1)", "must import"),
    "raises": ({"reference": "import no_such_thing  # {name}"}, "ModuleNotFoundError: No module named 'no_such_thing'", "must import"),
    "undeclared": ({"declaration": ""}, "has no `op`", "op = kdk.Op(...)"),
    "misspelt": ({"declaration": DECLARATION.replace("outputs=", "output=")}, "unexpected keyword argument 'output'", "must import"),
    "no_shape": ({"declaration": DECLARATION.replace(', "y": "*N H"', "")}, "`shapes` lacks 'y'", "correct `op = Op(...)`"),
    "saves": ({"declaration": TWO_RESULTS}, "annotated to return 1 result(s); `outputs` and `saved` name 2: y, s", "or its reference"),
    "untyped": ({"reference": REFERENCE.replace("times: float)", "times)")}, "does not take the signatures of untyped", "annotate every"),
    "letters": ({"cases": CASES.replace('"H"', '"W"')}, "has the letters ['N', 'W']; the declared shapes have ['H', 'N']", "CASES ="),
    "scalars": ({"cases": CASES.replace("times", "factor")}, "for ['factor']; the scalar arguments are ['times']", "CASES ="),
    "no_cases": ({"cases": ""}, "cases.py of no_cases cannot be read: AttributeError", "CASES ="),
}


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize("name", WRONG)
def test_a_folder_that_is_wrong(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, problem, way_out = WRONG[name]
    folder = operator(tmp_path / name, **files)  # type: ignore[arg-type]
    if name == "without_init":
        (folder / "__init__.py").unlink()
    code, error = check(folder, capsys)
    assert code == 2
    assert error.startswith("kdk: [KDK-") and error.count("\n") == 1, error
    assert problem in error and way_out in error.partition(". Way out: ")[2]


@pytest.mark.usefixtures("forget")
def test_folders_without_an_operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = check(tmp_path / "absent", capsys)
    assert code == 2 and "no such folder" in error and error.count("\n") == 1
    code, error = check(tmp_path, capsys)
    assert code == 2 and "no operator in the folder" in error and "docs/new-operator.md" in error and error.count("\n") == 1


def test_one_folder_and_a_folder_of_several(tmp_path: Path) -> None:
    """The shapes `--ops` takes. In one process after the other: torch forgets no operator."""
    operator(tmp_path / "single_times")
    operator(tmp_path / "several" / "first_times")
    operator(tmp_path / "several" / "second_times")
    (tmp_path / "several" / "notes").mkdir()
    words = "'check', '--implementation', 'reference', '--case', 'plain', '--jobs', '0', '--ops'"
    for directory, names in (("single_times", ["single_times"]), ("several", ["first_times", "second_times"])):
        file = tmp_path / f"{directory}.json"
        code = f"from kdk_bench import cli; cli.main([{words}, {str(tmp_path / directory)!r}, '--json', {str(file)!r}])"
        done = python(tmp_path, code)
        assert done.returncode == 0, done.stderr
        assert [r["op"] for r in json.loads(file.read_text())["results"]] == names
