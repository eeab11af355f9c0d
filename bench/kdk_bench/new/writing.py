"""Writes the files of a new operator."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kdk.errors import UsageError
from kdk_bench.new.captured import captured

TEMPLATES = Path(__file__).parent / "templates"
ANY = ("__init__.py", "reference.py", "cases.py", "patterns.py")
KERNELS = ("triton.py", "pallas.py", "nki.py")

EXAMPLES: dict[str, dict[str, Any]] = {
    "elementwise": {
        "says": "y = x * sigmoid(x)", "steps": ["v0 = torch.sigmoid(x)"], "results": ["x * v0"], "shapes": {"x": "*N H", "y": "*N H"},
        "dims": {"N": "", "H": ""}, "sizes": {"N": 512, "H": 1024}, "longest": "", "independent": ("N", "H"),
    },
    "row": {
        "says": "y = x - mean(x), over the last dimension", "steps": ["v0 = x.mean(-1, keepdim=True)"], "results": ["x - v0"],
        "shapes": {"x": "*N H", "y": "*N H"}, "dims": {"N": "", "H": "minimum=1"}, "sizes": {"N": 512, "H": 1024}, "longest": "H",
        "independent": ("N",),
    },
    "matmul": {
        "says": "y = z * sigmoid(z) with z = x @ weight.T + bias", "steps": ["z = x @ weight.t() + bias"],
        "results": ["z * torch.sigmoid(z)"], "shapes": {"x": "*N K", "weight": "M K", "bias": "M", "y": "*N M"},
        "dims": {"N": "", "M": "", "K": "minimum=1"}, "sizes": {"N": 512, "M": 1024, "K": 1024}, "longest": "K",
        "independent": ("N", "M"),
    },
    "gather": {
        "says": "y[i] = table[index[i]] * factor[i], rows of a table by their numbers", "steps": ["rows = table[index.long()]"],
        "results": ["rows * factor.unsqueeze(-1)"], "shapes": {"table": "R H", "index": "*N", "factor": "*N", "y": "*N H"},
        "dims": {"N": "", "R": "minimum=1", "H": ""}, "sizes": {"N": 512, "R": 1000, "H": 1024}, "longest": "",
        "independent": ("N", "H"), "index": {"index": "R"},
    },
}  # fmt: skip
"""A small operator of each kind, whose kernels are written."""


def write(name: str, kind: str, finding: Mapping[str, Any] | None, folder: str) -> Path:
    """The operator's folder, new. Raises UsageError for a name that is none, and where the folder is there already."""
    import kdk.ops  # noqa: F401  (registers the operators)
    from kdk import registry

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError("NEW-NAME", "the operator's name", value=repr(name), limit="small letters, digits and _, a letter first")
    if name in registry.OPERATORS:
        raise UsageError("NEW-NAME", "there is an operator of this name", value=name, way_out="another name")
    target = Path(folder) / name
    if target.exists():
        raise UsageError("NEW-DIR", f"{target} is there already", value=str(target), way_out="another name, or --dir")
    values = _complete({"name": name, **(captured(finding) if finding else {**EXAMPLES[kind], "kind": kind})})
    environment = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    texts = {file: environment.get_template(f"{file}.j2").render(values) for file in ANY}
    texts |= {file: environment.get_template(f"{values['kind']}_{file}.j2").render(values) for file in KERNELS}
    try:
        target.mkdir(parents=True)
        for file, text in texts.items():
            (target / file).write_text(text.rstrip() + "\n")
    except OSError as error:
        raise UsageError("NEW-DIR", f"{target} could not be written", value=str(error), way_out="--dir with a folder of yours") from None
    return target


def _complete(values: dict[str, Any]) -> dict[str, Any]:
    """What the templates read beside what is said: signatures, names, dtypes and shapes of the results."""
    written = "where" not in values
    outputs = [name for name in values["shapes"] if name == "y" or re.fullmatch(r"y\d+", name)]
    inputs = [name for name in values["shapes"] if name not in outputs]
    index, scalars = values.get("index", {}), values.get("scalars", {})
    kinds = {"bool": "bool", "int": "int", "float": "float"}
    arguments = [f"{n}: Tensor" for n in inputs] + [f"{n}: {kinds[type(v).__name__]}" for n, v in scalars.items()]
    dtypes = values.get("dtypes", ["dtype"] * len(outputs))
    first = next(name for name in inputs if name not in index)
    text = " ".join([*values["steps"], *values["results"]])
    results = [(_shape(values["shapes"], inputs, n), f"{first}.dtype" if d == "dtype" else d) for n, d in zip(outputs, dtypes)]
    return {
        "where": "", "tried": False, "fills": "", "label": "example", **values, "written": written, "inputs": inputs, "outputs": outputs,
        "index": index, "scalars": scalars, "signature": ", ".join(arguments), "wide": [n for n in inputs if n not in index],
        "dtypes": dtypes, "returns": "Tensor" if len(outputs) == 1 else f"tuple[{', '.join(['Tensor'] * len(outputs))}]",
        "uses_f": re.search(r"\bF\.", text) is not None,
        "shapes_of_results": results,
    }  # fmt: skip


def _shape(shapes: Mapping[str, str], inputs: list[str], output: str) -> str:
    """The shape of a result as an expression of the inputs' shapes."""
    parts = []
    for word in shapes[output].split():
        letter = word.strip("*").partition("|")[0]
        # Of a tensor whose size in this letter is never 1 in its place.
        name, place, words = next(
            (name, place, shapes[name].split())
            for name in inputs
            for place, other in enumerate(shapes[name].split())
            if other.strip("*") == letter
        )
        if word.startswith("*"):
            parts.append(f"*{name}.shape[:{1 - len(words)}]" if len(words) > 1 else f"*{name}.shape")
        else:
            parts.append(f"{name}.shape[{place - len(words)}]")
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
