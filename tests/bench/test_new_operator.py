"""docs/new-operator.md, followed word by word: its files are written, its commands run, and print what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "new-operator.md").read_text()
EVERY_DTYPE = "kdk check --ops my_operators --jobs 0;"  # three times the work of the others together
BLOCK = re.compile(r"^`(?P<file>[\w/.]+)`:\n\n```python\n(?P<text>.*?)^```$|^```console\n(?P<console>.*?)^```$", re.M | re.S)


def steps() -> Iterator[tuple[str, str]]:
    """("a file's name", its text) and ("$ a command", what it prints), in the order of the page."""
    for block in BLOCK.finditer(PAGE):
        if block["file"]:
            yield block["file"], block["text"]
        else:
            for part in re.split(r"^(?=\$ )", block["console"], flags=re.M)[1:]:
                command, _, printed = part.partition("\n")
                yield command, printed


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """An author's folder, with `kdk` and `python` on the path."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (("kdk", "-m kdk_bench.cli "), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        (programs / name).chmod(0o755)
    paths = os.pathsep.join(str(ROOT / root) for root in ("bindings", "kernels", "bench"))
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    work = tmp_path / "work"
    work.mkdir()
    yield work, {**os.environ, "PATH": path, "PYTHONPATH": paths, "COLUMNS": "100", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def write(work: Path, name: str, text: str) -> None:
    (work / name).parent.mkdir(parents=True, exist_ok=True)
    (work / name).write_text(text)


def run(command: str, work: Path, env: dict[str, str]) -> str:
    done = subprocess.run(command.removeprefix("$ "), shell=True, cwd=work, env=env, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def outcome(printed: str) -> list[str]:
    """What was printed without frames, line breaks and numbers (which change with the edges that kdk tries). Of a failed case
    the row and the likely cause: which case is the smallest changes too."""
    exit_code = re.findall(r"^exit code \d$", printed, re.M)
    table, failed, case = printed.partition("\nfailed ")
    row = case.partition(":")[0]
    cause = re.findall(r"^likely cause: ([\w ]+):", case, re.M)
    words = re.sub(r"[\d.]+", "#", re.sub(r"[┏━┳┓┃┡╇┩│└─┴┘\s]+", " ", table)).split()
    return [*words, failed, row, *cause, *exit_code]


def test_the_page_has_every_part() -> None:
    names = [name for name, _ in steps()]
    kernels = [f"{language}{direction}.py" for language in ("triton", "pallas", "nki") for direction in ("", "_backward")]
    for name in ("reference.py", "__init__.py", "cases.py", *kernels):
        assert f"my_operators/l2_normalize/{name}" in names
    assert sum(name.startswith("$ kdk check") for name in names) == 4
    assert sum(name.startswith(f"$ {EVERY_DTYPE}") for name in names) == 1


def test_following_the_page(shell: tuple[Path, dict[str, str]]) -> None:
    work, env = shell
    for name, text in steps():
        if not name.startswith("$ "):
            write(work, name, text)
        elif EVERY_DTYPE not in name:
            assert outcome(run(name, work, env)) == outcome(text), name


@pytest.mark.slow
def test_every_dtype(shell: tuple[Path, dict[str, str]]) -> None:
    work, env = shell
    for name, text in steps():
        if not name.startswith("$ "):
            write(work, name, text)
        elif EVERY_DTYPE in name:
            printed = run(name, work, env)
            assert outcome(printed) == outcome(text) and "passed" in printed and "exit code 0" in printed


def test_the_outcome_of_a_failure_is_not_that_of_a_pass() -> None:
    """The comparison above can fail."""
    ran = {command: printed for command, printed in steps() if command.startswith("$ kdk check")}
    outcomes = [outcome(printed) for printed in ran.values()]
    assert all(a != b for i, a in enumerate(outcomes) for b in outcomes[:i])
    (failed,) = [printed for printed in ran.values() if "exit code 1" in printed]
    assert outcome(failed) != outcome(failed.replace("wrong scale", "skipped tile"))
    assert outcome(failed) != outcome(failed.replace("exit code 1", "exit code 0"))
    assert outcome(failed)[-3:] == ["l2_normalize.forward triton sm_90 float32", "wrong scale", "exit code 1"]
