"""Formulas that a platform computes as a chain of small operators: what they cost, and what fills them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kdk_bench.audit import runs
from kdk_bench.audit.chips import seconds
from kdk_bench.audit.fills import OPEN, refusal
from kdk_bench.audit.findings import Finding, identity
from kdk_bench.audit.matching import Hit
from kdk_bench.audit.support import Platform
from kdk_bench.audit.trace import Call, Capture, Meta

# torch functions that a platform may have a kernel of its own for, as a whole.
COMPOSITES = {"torch.nn.functional.": "aten::", "torch.": "aten::", "torch.Tensor.": "aten::"}


def of_chains(hits: Sequence[Hit], capture: Capture, platforms: Sequence[Platform], fills: Mapping[str, dict[str, Any]]) -> list[Finding]:
    """One finding per platform, formula and module, layers counted together."""
    found: dict[str, Finding] = {}
    backward = _backward(capture)
    for hit in hits:
        forward = sum(c.bytes for c in hit.calls), sum(c.flops for c in hit.calls), sum(1 for c in hit.calls if not c.view)
        after = _bytes(hit, capture)
        lines = {(c.module, c.line) for c in hit.calls}
        back = [c for place in lines for c in backward.get(place, ())]
        for platform in platforms:
            if native(hit, platform):
                continue
            key = identity("chain", platform.name, hit.chain.name, hit.module)
            finding = found.get(key)
            if finding is None:
                finding = found[key] = Finding(
                    key,
                    "chain",
                    platform.name,
                    "",
                    hit.chain.name,
                    hit.module,
                    hit.line,
                    says=_says(hit),
                    filled_by=filled(hit, capture, platform, fills),
                    evidence=_evidence(hit),
                    cost={"now": 0.0, "after": 0.0, "evidence": "modelled"},
                    program=_formula(hit, capture) if hit.chain.name not in fills else {},
                )
            finding.calls_per_step += 1
            finding.cost["now"] += seconds(platform.chip, *forward)
            finding.cost["after"] += seconds(platform.chip, after, forward[1], 1)
            if back:
                moved = sum(c.bytes for c in back), sum(c.flops for c in back), sum(1 for c in back if not c.view)
                finding.cost["now"] += seconds(platform.chip, *moved)
                # Of a fused backward: the inputs and the gradient of the result in, the gradients of the inputs out.
                finding.cost["after"] += seconds(platform.chip, 2.0 * after, moved[1], 1)
    return list(found.values())


def filled(hit: Hit, capture: Capture, platform: Platform, fills: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What fills it here: the operator's kernel, unless it refuses the model's own tensors."""
    entry = fills.get(hit.chain.name, OPEN)
    if entry["what"] != "kdk":
        return entry
    reason = refusal(hit, capture, platform)
    return {"what": "open", "name": f"{entry['name']} refuses: {reason}", "evidence": []} if reason else entry


def _formula(hit: Hit, capture: Capture) -> dict[str, Any]:
    """For `kdk new`: the catalogue's formula with the tensors and numbers that were observed."""
    inputs = []
    for name, given in hit.inputs.items():
        meta = capture.metas[given.value]
        inputs.append([name, str(Meta(meta.dtype, given.shape(meta.shape) or meta.shape, "contiguous"))])
    return {"formula": hit.chain.name, "inputs": inputs, "scalars": {n: hit.scalars[n] for n in hit.chain.scalars if n in hit.scalars}}


def native(hit: Hit, platform: Platform) -> bool:
    """The model calls one torch function for all of it, and the platform has a kernel for that function."""
    functions = {c.function for c in hit.calls if not c.view}
    if len(functions) != 1:
        return False
    function = functions.pop()
    return any(function.startswith(start) and platform.has_native(to + function.removeprefix(start)) for start, to in COMPOSITES.items())


def _says(hit: Hit) -> str:
    kernels = [c for c in hit.calls if not c.view]
    return f"{len(kernels)} operators where one would do: {', '.join(dict.fromkeys(c.op.rpartition('::')[2] for c in kernels))}"


def _evidence(hit: Hit) -> dict[str, Any]:
    if hit.confirmed:
        return {"kind": "measured", "source": f"the reference of {hit.chain.name} gave the model's own result on the captured tensors"}
    return {"kind": "unknown", "source": f"matched by its operators, not confirmed: {hit.reason}"}


def size(meta: Meta) -> int:
    import torch

    n = getattr(torch, meta.dtype).itemsize
    for extent in meta.shape:
        n *= extent
    return int(n)


def _bytes(hit: Hit, capture: Capture) -> int:
    values = {*(i.value for i in hit.inputs.values()), *(v for v in hit.outputs if v >= 0)}
    return sum(size(capture.metas[v]) for v in values)


def _backward(capture: Capture) -> dict[tuple[str, str], list[Call]]:
    found: dict[tuple[str, str], list[Call]] = {}
    for call in capture.graph:
        if call.phase == "backward":
            found.setdefault((call.module, call.line), []).append(call)
    return found


def of_runs(hits: Sequence[Hit], capture: Capture, platforms: Sequence[Platform]) -> list[Finding]:
    """Runs of element-wise operators that no formula names, with their program for `kdk new`."""
    taken = {c.number for hit in hits for c in hit.calls}
    found: dict[str, Finding] = {}
    for run in runs.elementwise(capture, taken):
        forms = "+".join(c.op.rpartition("::")[2] for c in run.calls)
        moved = sum(c.bytes for c in run.calls), sum(c.flops for c in run.calls), len(run.calls)
        after = sum(size(capture.metas[v]) for v in (*run.inputs, run.output))
        for platform in platforms:
            key = identity("chain", platform.name, "element-wise", forms, run.calls[-1].module)
            finding = found.get(key)
            if finding is None:
                finding = found[key] = Finding(
                    key,
                    "chain",
                    platform.name,
                    "",
                    "element-wise",
                    run.calls[-1].module,
                    run.calls[-1].line,
                    says=f"{len(run.calls)} operators where one would do: {forms}",
                    filled_by=OPEN,
                    cost={"now": 0.0, "after": 0.0, "evidence": "modelled"},
                    evidence={"kind": "measured", "source": "the eager run; a compiler fuses these inside one graph"},
                    program=runs.program(run.calls, run.inputs, (run.output,), capture),
                )
            finding.calls_per_step += 1
            finding.cost["now"] += seconds(platform.chip, *moved)
            finding.cost["after"] += seconds(platform.chip, after, moved[1], 1)
    return list(found.values())


def of_loops(capture: Capture, platforms: Sequence[Platform], fills: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Loops in Python whose turns wait for each other: a launch per operator and turn; layers counted together. fills: of every
    platform."""
    found: dict[str, Finding] = {}
    for loop in runs.loops(capture):
        first = loop.calls[0]
        names = ", ".join(op.rpartition("::")[2] for op in loop.operators)
        pattern = "linear_recurrence" if loop.linear else "loop"
        confirmed = "the captured states are h = a * h + b" if loop.linear else "the eager run"
        moved = sum(c.bytes for c in loop.calls), sum(c.flops for c in loop.calls), len(loop.calls)
        for platform in platforms:
            key = identity("loop", platform.name, first.module, names)
            new = Finding(
                key, "loop", platform.name, "", pattern, first.module, first.line,
                says=f"a Python loop of {loop.turns} turns, each waiting for the one before: {names}",
                filled_by=fills[platform.name].get(pattern, OPEN), evidence={"kind": "measured", "source": confirmed},
                cost={"now": 0.0, "after": 0.0, "evidence": "modelled"},
            )  # fmt: skip
            finding = found.setdefault(key, new)
            finding.calls_per_step += len(loop.calls)
            finding.cost["now"] += seconds(platform.chip, *moved)
            finding.cost["after"] += seconds(platform.chip, moved[0] / 3, moved[1], 1)
    return list(found.values())


def modules(hits: Iterable[Hit]) -> dict[str, list[str]]:
    """Formula -> the modules in which it was found, in order."""
    found: dict[str, list[str]] = {}
    for hit in hits:
        found.setdefault(hit.chain.name, []).append(hit.module)
    return found
