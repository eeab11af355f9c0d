"""The author's own files, read without running them: lines that must change, and libraries that block."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kdk_bench.audit.blind import EXTENSION, RAW, UNWRITTEN
from kdk_bench.audit.findings import OPEN, Finding, identity
from kdk_bench.audit.places import short
from kdk_bench.audit.redirecting import DEVICE
from kdk_bench.audit.support import Platform
from kdk_bench.audit.trace import Capture

DEVICE_ARGUMENT = "torch.accelerator.current_accelerator(), or a device argument"
REWRITES = {
    "torch.cuda.is_available": "torch.accelerator.is_available()",
    "torch.cuda.synchronize": "torch.accelerator.synchronize()",
    "torch.cuda.device_count": "torch.accelerator.device_count()",
    "torch.cuda.set_device": "torch.accelerator.set_device_index()",
    "torch.cuda.empty_cache": "torch.accelerator.empty_cache()",
    "torch.cuda.manual_seed": "torch.manual_seed(): it seeds every device",
    "nccl": "the platform's own backend",
    "custom extension": "an operator with a kernel for the platform: kdk new writes its folder",
}
EXTENSIONS = ("CUDAExtension", "CppExtension", "load_inline", "load_library")


@cache
def libraries() -> dict[str, Any]:
    """libraries.json: where a library does not run, why, and what does."""
    return dict(json.loads((Path(__file__).parent / "libraries.json").read_text()))


def own_files(files: Iterable[str]) -> list[Path]:
    """The given files and the modules that they import from below the same folder; nothing that is installed."""
    todo = [Path(f).resolve() for f in files if f]
    found: list[Path] = []
    while todo:
        file = todo.pop()
        if file in found or not file.exists() or "site-packages" in file.parts:
            continue
        found.append(file)
        for name, _ in imports(file):
            for root in (file.parent, file.parent.parent):
                path = root / Path(*name.split("."))
                todo += [p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()]
    return found


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, with the line."""
    try:
        tree = ast.parse(file.read_text())
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno


def cuda_lines(file: Path) -> Iterator[tuple[int, str]]:
    """(line, what) of everything in a file that names cuda: calls of .cuda(), device strings, torch.cuda, nccl, extensions."""
    try:
        tree = ast.parse(file.read_text())
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            yield node.lineno, ".cuda()"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _device(node.value):
            yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and _dotted(node.value) == "torch.cuda":
            yield node.lineno, f"torch.cuda.{node.attr}"
        elif isinstance(node, ast.Name | ast.Attribute) and (getattr(node, "id", "") or getattr(node, "attr", "")) in EXTENSIONS:
            yield node.lineno, "a custom extension"


def _device(text: str) -> bool:
    return text in ("cuda", "nccl") or (text.startswith("cuda:") and (text[5:].isdigit() or not text[5:]))


def _dotted(node: ast.Attribute) -> str:
    return f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else ""


def of_code(capture: Capture, platforms: Sequence[Platform]) -> list[Finding]:
    """Lines that must change for any platform but cuda: seen in the source, or met in the run."""
    if all(p.name == "cuda" for p in platforms):
        return []
    lines: dict[str, dict[str, Any]] = {}
    for file in own_files(capture.files):
        for number, what in cuda_lines(file):
            entry = lines.setdefault(f"{short(str(file))}:{number}", {"what": [], "count": 0})
            if what not in entry["what"]:
                entry["what"].append(what)
    for event in capture.events:
        if event.kind == DEVICE:
            entry = lines.setdefault(event.line, {"what": [], "count": 0})
            entry["count"] += event.count
            if not entry["what"]:
                entry["what"].append(event.text)
    return [
        Finding(
            identity("code", "", line.rpartition(":")[0], *entry["what"], str(_nth(lines, line))),
            "code",
            "",
            line=line,
            blocking=True,
            says=", ".join(entry["what"]),
            calls_per_step=entry["count"],
            filled_by={"what": "rewrite", "name": _rewrite(entry["what"]), "evidence": []},
            evidence={"kind": "measured", "source": "the run asked for cuda there" if entry["count"] else "the source names cuda there"},
        )
        for line, entry in sorted(lines.items())
    ]


def _rewrite(what: Sequence[str]) -> str:
    """What the line becomes: the first that is known by name, else a device that is asked for."""
    return next((new for text in what for old, new in REWRITES.items() if old in text), DEVICE_ARGUMENT)


def _nth(lines: dict[str, Any], line: str) -> int:
    """Among equal requests in one file, which one: line numbers move, their order does not."""
    file = line.rpartition(":")[0]
    same = [k for k, v in lines.items() if k.rpartition(":")[0] == file and v["what"] == lines[line]["what"]]
    return same.index(line)


def of_libraries(capture: Capture, platforms: Sequence[Platform]) -> list[Finding]:
    """Libraries that the author's files import, or that were loaded by the run, and that do not run on a platform."""
    where: dict[str, str] = {}
    for file in own_files(capture.files):
        for name, number in imports(file):
            where.setdefault(name.partition(".")[0], f"{short(str(file))}:{number}")
    found = []
    for platform in platforms:
        for name, entry in libraries().items():
            if platform.name not in entry["blocks"] or name not in where:
                continue
            found.append(
                Finding(
                    identity("library", platform.name, name),
                    "library",
                    platform.name,
                    line=where[name],
                    blocking=True,
                    says=f"{name}: {entry['why']}",
                    filled_by={"what": "rewrite", "name": entry["instead"], "evidence": []},
                    evidence={"kind": "declared", "source": "the library's documentation"},
                )
            )
    return found


def of_blind_spots(capture: Capture) -> list[Finding]:
    """What ran past the dispatcher, or stood in for a fast path without a word."""
    source = {"kind": "measured", "source": "the eager run"}
    found: dict[str, Finding] = {}
    for event in capture.events:
        if event.kind in (DEVICE, "note"):
            continue
        key = identity("blind", "", event.kind, event.text, event.line.rpartition(":")[0])
        finding = found.setdefault(
            key,
            Finding(
                key, "blind", "", line=event.line, says=f"{event.kind}: {event.text}",
                filled_by=OPEN if event.kind in (RAW, EXTENSION, UNWRITTEN) else {}, evidence=source,
            ),
        )  # fmt: skip
        finding.calls_per_step += -(-event.count // max(1, len(capture.steps)))
    for step in capture.steps:
        for call in step.calls:
            if call.op.startswith(("aten::", "prim::", "profiler::")):
                continue
            key = identity("blind", "", call.op)
            says = f"{call.op}: an operator outside aten, whose inside the audit does not see"
            new = Finding(key, "blind", "", call.op, "", call.module, call.line, says=says, evidence=source)
            finding = found.setdefault(key, new)
            finding.calls_per_step += step is capture.steps[0]
    return list(found.values())
