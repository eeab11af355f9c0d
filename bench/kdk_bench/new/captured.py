"""Of a finding of `kdk audit`: what the templates of a new operator read. The program is what the model computed there."""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kdk.errors import UsageError
from kdk_bench.audit.chains import Chain, unify

LETTERS = "ABCDEFGHJKLMNPQRSTUVW"
PLAIN = (ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Subscript, ast.UnaryOp, ast.USub, ast.keyword, ast.expr_context)
LARGEST = 1 << 24  # elements: larger programs are tried without data


def captured(finding: Mapping[str, Any]) -> dict[str, Any]:
    """Reference, shapes in letters with the sizes that were observed, and the kind of the kernels' skeleton."""
    program = finding["program"]
    if not well_formed(program):
        way_out = "audit again with --json"
        raise UsageError("NEW-FINDING", f"the program of {finding['id']} is not as kdk wrote it", value=program, way_out=way_out)
    said: dict[str, Any] = {"where": f"{finding['id']}: {finding['module'] or 'the model'}, {finding['line'] or 'a line unknown'}"}
    said["says"] = f"What {finding['module'] or 'the model'} computes at {finding['line'] or 'a line unknown'}"
    said["label"] = finding["module"] or "observed"
    made = _of_formula(program) if "formula" in program else _of_calls(program, finding["op"])
    return {**made, **said, "index": {}}


def well_formed(program: Any) -> bool:
    """Whether a program of a report is what `runs.program` writes. It is run: nothing but calls of torch's operators may be in it."""
    try:
        pairs = [*program["inputs"], *program.get("steps", ())]
        if not all(isinstance(text, str) for pair in pairs for text in pair) or not all(len(pair) == 2 for pair in pairs):
            return False
        if not all(name.isidentifier() and re.fullmatch(r"\w+\[[\d, ]*\]( \w+)?", text) for name, text in program["inputs"]):
            return False
        if "formula" in program:
            return isinstance(program["scalars"], dict)
        steps = [text for _, text in program["steps"]]
        return all(name.isidentifier() for name, _ in program["steps"]) and all(map(_is_plain, [*steps, *program["outputs"]]))
    except (TypeError, KeyError, ValueError, AttributeError, SyntaxError):
        return False


def _is_plain(text: str) -> bool:
    """Calls of torch.ops.LIBRARY.OPERATOR.OVERLOAD and float, of names, numbers, words of torch and lists of them."""
    for node in ast.walk(ast.parse(text, mode="eval").body):
        if isinstance(node, ast.Call):
            if not re.fullmatch(r"torch\.ops(\.\w+){3}|float", ast.unparse(node.func)):
                return False
        elif isinstance(node, ast.Attribute):
            if not re.fullmatch(r"torch\.(ops(\.\w+){0,3}|\w+)", ast.unparse(node)) or node.attr.startswith("__"):
                return False
        elif not isinstance(node, PLAIN):
            return False
    return True


def _of_formula(program: Mapping[str, Any]) -> dict[str, Any]:
    """A formula of the catalogue: its own function, confirmed on the model's tensors."""
    from kdk_bench.audit.catalogue import CATALOGUE

    chain = next((c for c in CATALOGUE if c.name == program["formula"]), None)
    if chain is None:
        raise UsageError("NEW-FINDING", "the catalogue has no such formula now", value=program["formula"], way_out="audit again")
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(chain.reference))).body
    assert isinstance(function, ast.FunctionDef)
    *steps, last = function.body[1:]
    assert isinstance(last, ast.Return) and last.value is not None
    sizes: dict[str, int] = {}
    for name, text in program["inputs"]:
        sizes = unify(chain.shapes[name], parse(text)[1], sizes) or sizes
    return {
        "kind": _kind_of(chain), "steps": [ast.unparse(s) for s in steps], "results": [ast.unparse(last.value)],
        "shapes": dict(chain.shapes), "scalars": dict(program["scalars"]), "dims": dict.fromkeys(sizes, "minimum=1"), "sizes": sizes,
        "tried": True,
        "longest": _longest(dict(chain.shapes)), "independent": ("N",) if "N" in sizes and chain.shapes["y"].startswith("*N") else (),
        "fills": "",
    }  # fmt: skip


def _kind_of(chain: Chain) -> str:
    """By the letters and what one element of the result depends on."""
    generator = torch.Generator().manual_seed(0)
    if any(text not in ("*N H", "H") for text in chain.shapes.values()):
        return "whole"
    size = chain.sizes["H"], chain.sizes["N"]
    return _kind([torch.randn(size[::-1], generator=generator) for _ in chain.arguments], lambda *tensors: (chain.reference(*tensors),))


def _of_calls(program: Mapping[str, Any], op: str) -> dict[str, Any]:
    """Calls of aten operators, as they were recorded."""
    steps = [f"{name} = {call}" for name, call in program["steps"]]
    observed = {name: parse(text) for name, text in program["inputs"]}
    strange = {name: dtype for name, (dtype, _) in observed.items() if not getattr(torch, dtype).is_floating_point}
    if strange:
        raise UsageError(
            "NEW-FINDING", "its inputs are not all numbers with a fraction", value=strange, limit="float32, bfloat16 and float16",
            way_out="declare it by hand, as gather_rows is (`indexes`): docs/new-operator.md",
        )  # fmt: skip
    results = _run(steps, observed, program["outputs"])
    if any(not r.dtype.is_floating_point and r.dtype not in (torch.int64, torch.int32, torch.bool) for r in results):
        raise UsageError("NEW-FINDING", "a result has a dtype that no kernel has", value=[str(r.dtype) for r in results])
    shapes = {name: shape for name, (_, shape) in observed.items()}
    names = ["y"] if len(results) == 1 else [f"y{i}" for i in range(len(results))]
    shapes |= {name: tuple(r.shape) for name, r in zip(names, results)}
    letters, sizes = in_letters(shapes, list(observed))
    rows = all(text in ("*N H", "H") for text in letters.values()) and len(results) == 1
    kind = _kind([torch.randn(shape) for _, shape in observed.values()], lambda *t: _on(steps, list(observed), t, program["outputs"]), rows)
    expressions = [program["outputs"][0]] if len(results) == 1 else list(program["outputs"])
    return {
        "kind": kind, "steps": steps, "results": expressions, "shapes": letters, "scalars": {}, "sizes": sizes,
        "dims": dict.fromkeys(sizes, "minimum=1" if kind != "elementwise" else ""), "tried": kind == "whole",
        "longest": "H" if kind == "row" else _longest(letters),
        "independent": {"elementwise": ("N", "H"), "row": ("N",)}.get(kind, ()),
        "dtypes": ["dtype" if r.dtype.is_floating_point else "torch.int32" for r in results], "fills": op,
    }  # fmt: skip


def _run(steps: Sequence[str], observed: Mapping[str, tuple[str, tuple[int, ...]]], outputs: Sequence[str]) -> tuple[Tensor, ...]:
    """The program on random tensors of the observed shapes, or on tensors without data where these are large."""
    elements = sum(math.prod(shape) for _, shape in observed.values())
    device = "cpu" if elements <= LARGEST else "meta"
    tensors = [torch.rand(shape, device=device) for _, shape in observed.values()]
    try:
        return _on(steps, list(observed), tensors, outputs)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, SyntaxError, NameError) as error:
        way_out = "write it by hand: docs/new-operator.md"
        problem = "its program does not run by itself, on random tensors"
        raise UsageError("NEW-FINDING", problem, value=f"{type(error).__name__}: {error}".splitlines()[0], way_out=way_out) from None


def _on(steps: Sequence[str], names: Sequence[str], tensors: Sequence[Tensor], outputs: Sequence[str]) -> tuple[Tensor, ...]:
    space: dict[str, Any] = {"__builtins__": {"float": float}, "torch": torch, **dict(zip(names, tensors))}
    for step in steps:
        exec(step, space)  # what kdk wrote into the report: calls of torch alone
    return tuple(eval(name, space) for name in outputs)


def _kind(tensors: Sequence[Tensor], function: Any, rows: bool = True) -> str:
    """elementwise, row or whole, by what of the result changes with one element, and with one row, of the first input."""
    if not rows or sum(t.numel() for t in tensors) > LARGEST or tensors[0].dim() == 0:
        return "whole"
    changed = []
    for place in ((..., 0), (0, ...) if tensors[0].dim() > 1 else (..., 0)):
        other = tensors[0].clone()
        other[place] += 1.0
        before, after = function(*tensors)[0], function(other, *tensors[1:])[0]
        changed.append(~torch.isclose(before, after, rtol=1e-6, equal_nan=True))
    if changed[0][..., 1:].any():
        return "row" if not (tensors[0].dim() > 1 and changed[1][1:].any()) else "whole"
    return "elementwise"


def _longest(shapes: Mapping[str, str]) -> str:
    """The letters that no result has: those that are summed over."""

    def letters(text: str) -> list[str]:
        return [word.strip("*").partition("|")[0] for word in text.split()]

    kept = {letter for name, text in shapes.items() if name.startswith("y") for letter in letters(text)}
    return " ".join(dict.fromkeys(n for text in shapes.values() for n in letters(text) if n not in kept))


def in_letters(shapes: Mapping[str, tuple[int, ...]], inputs: Sequence[str]) -> tuple[dict[str, str], dict[str, int]]:
    """(the shapes in letters, the letters' sizes). Rows of the largest input and its last dimension, or a letter per size."""
    largest = max((shapes[name] for name in inputs), key=math.prod)
    if all(shape == largest or (len(shape) == 1 and shape == largest[-1:]) for shape in shapes.values()) and largest:
        rows = {name: "*N H" if shape == largest else "H" for name, shape in shapes.items()}
        return rows, {"N": math.prod(largest[:-1]), "H": largest[-1]}
    sizes = list(dict.fromkeys(size for name in inputs for size in shapes[name]))
    missing = {name: shape for name, shape in shapes.items() if name not in inputs and not set(shape) <= set(sizes)}
    if missing or len(sizes) > len(LETTERS):
        problem, limit = "the shapes of its results do not follow from those of its inputs", "sizes that its inputs have"
        way_out = "write it by hand, with the size as an argument (`sized`): docs/new-operator.md"
        raise UsageError("NEW-SHAPE", problem, value=missing, limit=limit, way_out=way_out)
    letter = dict(zip(sizes, LETTERS))
    return {name: " ".join(letter[size] for size in shape) for name, shape in shapes.items()}, {letter[size]: size for size in sizes}


def parse(text: str) -> tuple[str, tuple[int, ...]]:
    """("float32", (2, 3)) of "float32[2, 3]"."""
    dtype, _, rest = text.partition("[")
    return dtype, tuple(int(n) for n in rest.partition("]")[0].split(",") if n.strip())
