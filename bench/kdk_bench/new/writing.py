"""Writes the files of a new operator."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kdk.errors import UsageError

TEMPLATES = Path(__file__).parent / "templates"
FILES = ("__init__.py", "reference.py", "cases.py", "patterns.py", "triton.py", "pallas.py", "nki.py")
EXAMPLES = {
    "elementwise": ("y = x * sigmoid(x)", ["v0 = torch.sigmoid(x)", "v1 = x * v0"], "v1"),
    "row": ("y = x - mean(x), over the last dimension", ["v0 = x.mean(-1, keepdim=True)", "v1 = x - v0"], "v1"),
}


def write(name: str, kind: str, finding: Mapping[str, Any] | None, folder: str) -> Path:
    """The operator's folder, new. Raises UsageError for a name that is none, and where the folder is there already."""
    import kdk.ops  # noqa: F401  (registers the operators)
    from kdk import registry

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError("NEW-NAME", "the operator's name", value=repr(name), limit="small letters, digits and _, a letter first")
    if name in registry.OPERATORS:
        raise UsageError("NEW-NAME", "there is an operator of this name", value=name)
    target = Path(folder) / name
    if target.exists():
        raise UsageError("NEW-DIR", f"{target} is there already", way_out="another name, or --dir")
    values = {"name": name, "kind": kind, **(_captured(finding) if finding else _example(kind))}
    environment = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    target.mkdir(parents=True)
    for file in FILES:
        template = file if file in ("__init__.py", "reference.py", "cases.py", "patterns.py") else f"{kind}_{file}"
        text = environment.get_template(f"{template}.j2").render(values)
        (target / file).write_text(text.rstrip() + "\n")
    return target


def _example(kind: str) -> dict[str, Any]:
    says, steps, result = EXAMPLES[kind]
    return {
        "says": says, "inputs": ["x"], "shapes": {"x": "*N H"}, "steps": steps, "result": result, "written": True, "where": "",
        "sizes": [("example", 512, 1024)],
    }  # fmt: skip


def _captured(finding: Mapping[str, Any]) -> dict[str, Any]:
    """Of a finding: its inputs by the shapes that were observed, and its calls."""
    program = finding["program"]
    tensors = {name: parse(text) for name, text in program["inputs"]}
    (result,) = program["outputs"]
    largest = max((shape for _, shape in tensors.values()), key=_elements)
    shapes = {name: _letters(name, shape, largest) for name, (_, shape) in tensors.items()}
    rows = _elements(largest[:-1])
    return {
        "says": f"What {finding['module'] or 'the model'} computes at {finding['line'] or 'a line unknown'}",
        "inputs": list(tensors), "shapes": shapes, "steps": [f"{name} = {call}" for name, call in program["steps"]], "result": result,
        "written": False, "where": f"{finding['id']}: {finding['module']}, {finding['line']}",
        "sizes": [(finding["module"] or "observed", rows, largest[-1])],
    }  # fmt: skip


def parse(text: str) -> tuple[str, tuple[int, ...]]:
    """("float32", (2, 3)) of "float32[2, 3]"."""
    match = re.match(r"(\w+)\[([\d, ]*)\]", text)
    assert match
    return match[1], tuple(int(n) for n in match[2].split(",") if n.strip())


def _elements(shape: Sequence[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _letters(name: str, shape: tuple[int, ...], largest: tuple[int, ...]) -> str:
    if shape == largest:
        return "*N H"
    if len(shape) == 1 and shape[0] == largest[-1]:
        return "H"
    limit = f"the shape of the largest, {list(largest)}, or its last dimension"
    raise UsageError("NEW-SHAPE", f"the input {name} has a shape that the skeleton has no letters for", value=list(shape), limit=limit)
