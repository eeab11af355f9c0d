"""What a page says of an operator: its declaration, and the records of it by kind of evidence."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from kdk.backends import LANGUAGES, TARGETS
from kdk.dispatch import kernel_file
from kdk.op import Op
from kdk.selection import IMPLEMENTATIONS
from kdk_bench import stubs
from kdk_bench.declared_cases import cases_of
from kdk_bench.evidence import EVIDENCE, Record
from kdk_bench.expectation import outputs_of
from kdk_bench.operator_docs import limits

MACHINES = {"triton": "NVIDIA and AMD GPUs", "pallas": "Google TPUs", "nki": "AWS Trainium"}
NO_RECORD = "the store has no record that holds"
SHOWN = {"check": "results", "compile": "resources", "bench": "cost"}
UNDER_COMPILE = {
    "elementwise": "becomes its reference, which the compiler fuses, unless a kernel is asked for by name",
    "row": "becomes its reference, which the compiler fuses, unless a kernel is asked for by name",
    "algorithmic": "keeps its kernel",
}


def implementations(op: Op) -> list[tuple[str, str]]:
    """(implementation, direction) of everything that is there."""
    directions = [d for d in ("forward", "backward") if op.function(d) is not None]
    has = [(i, d) for i in IMPLEMENTATIONS for d in directions if i == "reference" or kernel_file(op, i, d)]
    return sorted(has, key=lambda pair: IMPLEMENTATIONS.index(pair[0]))


def declaration(op: Op) -> dict[str, Any]:
    """Signature, documentation, arguments and results, and what is promised of the operator as a whole."""
    documentation = inspect.getdoc(op.public or op.reference) or ""
    return {
        "name": op.name,
        "summary": op.summary,
        "signature": stubs.signature(op),
        "documentation": documentation.partition("\n")[2].strip(),
        "rows": [*_arguments(op), *_results(op)],
        "facts": [*_facts(op)],
        "cases": [(c.name, ", ".join(f"{n}={v}" for n, v in {**c.sizes, **c.scalars}.items())) for c in cases_of(op).models],
    }


def _arguments(op: Op) -> Iterable[tuple[str, str, str, str]]:
    """(name, shape, dtypes, what else) of every argument of the operator."""
    scalars, sized = cases_of(op).scalars, {scalar: letter for letter, scalar in op.sized.items()}
    for name, parameter in op.arguments.items():
        if name in op.tensors:
            dtypes = "int64, int32" if name in op.indexes else " ,".join(("working", *([op.mixed[name]] if name in op.mixed else [])))
            notes = ["may be left out"] if name in op.optional else []
            notes += [f"points into {op.indexes[name]}"] if name in op.indexes else []
            notes += [f"or {op.sentinels[name]}"] if name in op.sentinels else []
            notes += ["in [{:g}, {:g})".format(*op.ranges[name])] if name in op.ranges else []
            notes += ["differentiable"] if name in op.uses else []
            yield name, op.shapes[name], dtypes.replace(" ,", ", "), ", ".join(notes)
        else:
            tried = f"the size of {sized[name]}" if name in sized else f"checked with {', '.join(map(_value, _distinct(scalars[name])))}"
            yield name, "", stubs.annotation(parameter.annotation), tried


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _value(value: Any) -> str:
    return f"`{value}`" if isinstance(value, str) else str(value)


def _results(op: Op) -> Iterable[tuple[str, str, str, str]]:
    """The same of every output and saved tensor; dtypes as the reference returns them on tensors without data."""
    seen: dict[str, dict[str, list[str]]] = {}
    described = op.described("forward")
    assert described is not None
    for working in op.dtypes:
        for _, args in limits.calls(op, "forward", working):
            for name, t in zip((*op.outputs, *op.saved), outputs_of(described(*args))):
                dtype = str(t.dtype).removeprefix("torch.") if t is not None else "none"
                seen.setdefault(name, {}).setdefault(dtype, []).append(working)
    for name, found in seen.items():
        same = all([dtype] == _distinct(working) for dtype, working in found.items())
        kind = "saved for the backward" if name in op.saved else "result"
        kind += ", a discrete choice" if op.choice and name in op.choice.outputs else ""
        kind += f", quantised, times {op.quantised[name].scale}" if name in op.quantised else ""
        yield name, op.shapes[name], "working" if same and len(found) > 1 else ", ".join(found), kind


def _facts(op: Op) -> Iterable[tuple[str, str]]:
    yield "working dtypes", f"{', '.join(op.dtypes)}; float64 in the reference alone"
    yield "gradients", ", ".join(op.uses) if op.uses else "none: the operator has no backward"
    if op.backward_by:
        yield "its backward is", f"the operator {op.backward_by}"
    if op.public is None:
        yield "under torch.compile", UNDER_COMPILE[op.kind]
    else:
        yield "under torch.compile", f"{UNDER_COMPILE[op.kind]}; the public function around the operator is plain torch"
    yield "deterministic", "depends on its arguments" if callable(op.deterministic) else "yes" if op.deterministic else "no"
    yield "DTensor may split it along", ", ".join(op.independent) or "nothing: tensors are gathered first"
    if op.layouts:
        yield "memory formats kept", ", ".join(op.layouts)
    if op.fills:
        yield "stands in for", ", ".join(op.fills)


def promises(op: Op, records: Iterable[Record]) -> list[dict[str, str]]:
    """Per implementation and direction what is promised, and the evidence beside it."""
    rows, records = [], list(records)
    for implementation, direction in implementations(op):
        language = LANGUAGES.get(implementation)
        dtypes = [d for d in op.dtypes if language is None or d in language.dtypes]
        targets = ", ".join(language.targets) if language else "every device"
        mine = [r for r in records if (r["implementation"], r["direction"]) == (implementation, direction)]
        rows.append(
            {
                "implementation": f"{implementation} ({MACHINES.get(implementation, 'plain torch')})",
                "direction": direction,
                "promise": f"{targets}; {', '.join(dtypes)}",
                "evidence": kinds(mine) or f"unknown: {NO_RECORD}",
            }
        )
    return rows


def kinds(records: Iterable[Record]) -> str:
    """Chips by what was shown and the kind of evidence: "results, simulated: sm_90; resources, compiled: sm_90, sm_80"."""
    found: dict[str, set[str]] = {}
    for r in sorted(records, key=lambda r: (list(SHOWN).index(r["report"]), EVIDENCE.index(r["evidence"]))):
        found.setdefault(f"{SHOWN[r['report']]}, {r['evidence']}", set()).add(r["target"])
    return "; ".join(f"{what}: {', '.join(sorted(chips, key=_place))}" for what, chips in found.items())


def _place(target: str) -> int:
    """The default chip of a language first, as the language lists them."""
    return list(TARGETS).index(target) if target in TARGETS else -1


def in_order(records: Iterable[Record]) -> list[Record]:
    """By implementation, forward first, the default chip first."""
    return sorted(records, key=lambda r: (r["implementation"], r["direction"] == "backward", _place(r["target"])))
