"""Formulas that a platform computes as a chain of small operators: what they cost, and what fills them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kdk_bench.audit.chips import seconds
from kdk_bench.audit.findings import OPEN, Finding, identity
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
                    key, "chain", platform.name, "", hit.chain.name, hit.module, hit.line,
                    says=_says(hit), filled_by=fills.get(hit.chain.name, OPEN) if hit.chain.filled else OPEN, evidence=_evidence(hit),
                    cost={"now": 0.0, "after": 0.0, "evidence": "modelled"},
                )  # fmt: skip
            finding.calls_per_step += 1
            finding.cost["now"] += seconds(platform.chip, *forward)
            finding.cost["after"] += seconds(platform.chip, after, forward[1], 1)
            if back:
                moved = sum(c.bytes for c in back), sum(c.flops for c in back), sum(1 for c in back if not c.view)
                finding.cost["now"] += seconds(platform.chip, *moved)
                # Of a fused backward: the inputs and the gradient of the result in, the gradients of the inputs out.
                finding.cost["after"] += seconds(platform.chip, 2.0 * after, moved[1], 1)
    return list(found.values())


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
    values = {*hit.inputs.values(), *(v for v in hit.outputs if v >= 0)}
    return sum(size(capture.metas[v]) for v in values)


def _backward(capture: Capture) -> dict[tuple[str, str], list[Call]]:
    found: dict[tuple[str, str], list[Call]] = {}
    for call in capture.graph:
        if call.phase == "backward":
            found.setdefault((call.module, call.line), []).append(call)
    return found


def modules(hits: Iterable[Hit]) -> dict[str, list[str]]:
    """Formula -> the modules in which it was found, in order."""
    found: dict[str, list[str]] = {}
    for hit in hits:
        found.setdefault(hit.chain.name, []).append(hit.module)
    return found
