"""What the capture and the platforms' support mean for somebody who moves this model: findings, with a stable id each."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from kdk_bench.audit import runs
from kdk_bench.audit.chips import on_host, seconds
from kdk_bench.audit.fills import OPEN, for_operator
from kdk_bench.audit.support import Platform, Support
from kdk_bench.audit.trace import Capture, Group, Meta

KINDS = (
    "missing", "library", "code", "memory", "fallback", "condition", "sync", "dynamic", "shapes", "blind", "unknown", "wide", "complex",
    "chain", "loop", "precision", "graph break",
)  # fmt: skip
"""In the order in which equally urgent ones are shown."""
ACTS = ("missing", "fallback", "chain", "loop", "code", "library")


@dataclass
class Finding:
    """One thing to know or do. platform: "" for all. cost: seconds per step, now and after, with how they are known. filled_by: what
    (kdk, rewrite, open), name, evidence. program: for `kdk new`, the calls as text or the name of a formula."""

    id: str
    kind: str
    platform: str
    op: str = ""
    pattern: str = ""
    module: str = ""
    line: str = ""
    calls_per_step: int = 0
    blocking: bool = False
    says: str = ""
    cost: dict[str, Any] = field(default_factory=dict)
    filled_by: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)
    new: bool = False
    program: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def saved(self) -> float:
        return float(self.cost.get("now", 0.0)) - float(self.cost.get("after", 0.0))


def identity(kind: str, platform: str, *what: str) -> str:
    """A name that stays the same from run to run: layers' numbers and line numbers are left out of it."""
    text = "/".join(re.sub(r"\d+", "*", w) if "." in w or w.isdigit() else w for w in what)
    digest = hashlib.sha256(f"{kind}/{platform}/{text}".encode()).hexdigest()[:8]
    return "-".join(filter(None, (kind.replace(" ", "-"), platform, digest)))


@dataclass
class Op:
    """An operator of the report: a group of calls and each platform's support of it."""

    group: Group
    support: dict[str, Support]


def operators(groups: Iterable[Group], platforms: Sequence[Platform]) -> list[Op]:
    """Every group with its support; what torch does for itself (profiler, prims) is no operator of a platform."""
    kept = [g for g in groups if not g.op.startswith(("profiler::", "prim::"))]
    return [Op(g, {p.name: p.of(g.name, g.metas, g.example) for p in platforms}) for g in kept]


def of_operators(ops: Sequence[Op], platforms: Sequence[Platform], fills: Mapping[str, dict[str, Any]]) -> list[Finding]:
    """Missing, on the host, unknown, condition not met: one finding per platform, operator and status."""
    kinds = {"error": "missing", "host": "fallback", "unknown": "unknown", "conditional": "condition"}
    found: dict[str, Finding] = {}
    for platform in platforms:
        for op in ops:
            support = op.support[platform.name]
            kind = kinds.get(support.status)
            if kind is None:
                continue
            wide = kind == "condition" and support.condition.startswith("no 64-bit")
            kind = "wide" if wide else kind
            key = identity(kind, platform.name, op.group.name, support.condition if kind == "condition" else "")
            finding = found.get(key)
            if finding is None:
                finding = found[key] = Finding(
                    key, kind, platform.name, op.group.name, "", op.group.modules[0], op.group.lines[0], blocking=kind == "missing",
                    says=support.condition, filled_by=for_operator(op.group, platform, fills, OPEN if kind in ACTS else {}),
                    evidence={"kind": support.evidence, "source": support.source},
                    program=runs.program_of(op.group.example) if kind in ("missing", "fallback", "unknown") and op.group.example else {},
                )  # fmt: skip
            _add(finding, op.group, platform, support)
    return list(found.values())


def _add(finding: Finding, group: Group, platform: Platform, support: Support) -> None:
    finding.calls_per_step += group.count
    if finding.kind == "fallback":
        now = support.seconds * group.count if support.seconds else on_host(platform.chip, group.bytes, group.count)
        _cost(finding, now, seconds(platform.chip, group.bytes, group.flops, group.count), "measured" if support.seconds else "modelled")


def _cost(finding: Finding, now: float, after: float, known: str) -> None:
    finding.cost["now"] = finding.cost.get("now", 0.0) + now
    finding.cost["after"] = finding.cost.get("after", 0.0) + after
    finding.cost["evidence"] = known


def _tagged(group: Group, tag: torch.Tag) -> bool:
    library, _, name = group.op.partition("::")
    func = getattr(getattr(getattr(torch.ops, library, None), name, None), group.overload, None)
    return func is not None and tag in func.tags


def of_data(ops: Sequence[Op], platforms: Sequence[Platform]) -> list[Finding]:
    """Host synchronisation, shapes that depend on data, complex numbers: properties of the model, on every accelerator."""
    found: dict[str, Finding] = {}
    for op in ops:
        group = op.group
        kinds = []
        if _tagged(group, torch.Tag.dynamic_output_shape) and not (group.op.startswith("aten::index") and not _by_mask(group.metas)):
            kinds.append(("dynamic", "the shape of its result depends on data: a static compiler cannot take it, an eager device waits"))
        elif _tagged(group, torch.Tag.data_dependent_output) and group.phase != "optimiser":
            # The optimiser's step counters lie on the host.
            kinds.append(("sync", "the host waits for the device to read a value"))
        if any(m.dtype.startswith("complex") for m in group.metas):
            kinds.append(("complex", "complex numbers: no tensor engine has them"))
        for kind, says in kinds:
            key = identity(kind, "", group.name, group.modules[0])
            finding = found.setdefault(
                key,
                Finding(
                    key,
                    kind,
                    "",
                    group.name,
                    "",
                    group.modules[0],
                    group.lines[0],
                    says=says,
                    evidence={"kind": "measured", "source": "the eager run"},
                ),
            )
            finding.calls_per_step += group.count
            if kind in ("sync", "dynamic") and platforms:
                trip = max(p.chip.trip for p in platforms)
                _cost(finding, trip * group.count, 0.0, "modelled")
    return list(found.values())


def _by_mask(metas: Sequence[Meta]) -> bool:
    return any(m.dtype in ("bool", "uint8") for m in metas[1:])


def of_shapes(capture: Capture, platforms: Sequence[Platform]) -> list[Finding]:
    """How often a static or bounded compiler would compile, from the shapes of the inputs that were given."""
    keys = list(dict.fromkeys(step.inputs for step in capture.steps))
    dynamic = any(_tagged_call(call) for step in capture.steps for call in step.calls)
    found = []
    for platform in platforms:
        mode = platform.describes["compilation"]
        if not mode:
            continue
        number = len(keys) if mode == "static" else len({bounded(key) for key in keys})
        note = "; data-dependent shapes add one per new size" if dynamic else ""
        says = (
            f"{len(keys)} shape key{'s' * (len(keys) != 1)} over the inputs given: {number} compilation{'s' * (number != 1)} ({mode}){note}"
        )
        # The number of compilations is what stays the same: the sizes may vary.
        found.append(
            Finding(
                identity("shapes", platform.name),
                "shapes",
                platform.name,
                says=says,
                calls_per_step=number,
                evidence={"kind": "modelled", "source": f"{mode} compilation, as {platform.name}'s documentation describes it"},
            )
        )
    return found


def bounded(key: Sequence[Meta]) -> tuple[Any, ...]:
    """Shapes up to the next power of two, which is what a bound covers."""
    return tuple((m.dtype, tuple(1 << (n - 1).bit_length() if n > 1 else n for n in m.shape)) for m in key)


def _tagged_call(call: Any) -> bool:
    group = Group(call.op, call.overload, call.phase, call.metas)
    return _tagged(group, torch.Tag.dynamic_output_shape) and not (call.op.startswith("aten::index") and not _by_mask(call.metas))


def of_graph_break(capture: Capture) -> list[Finding]:
    """The model is no single graph: a compiler takes it in pieces, or not at all."""
    if not capture.graph_breaks:
        return []
    source = {"kind": "measured", "source": "torch.export.export(strict=False) of this model"}
    return [Finding(identity("graph break", ""), "graph break", "", says=capture.graph_breaks, evidence=source)]


def of_memory(capture: Capture, platforms: Sequence[Platform]) -> tuple[dict[str, int], list[Finding]]:
    """The predicted peak, and a finding where it is more than the chip holds."""
    parts = dict(capture.memory)
    parts["activations"] = max((s.live_peak for s in capture.steps), default=0)
    # What is alive at the peak contains the gradients, and the optimiser's state when it was made then.
    parts["activations"] = max(0, parts["activations"] - parts.get("gradients", 0))
    total = sum(parts.values())
    found = []
    for platform in platforms:
        if total > platform.chip.hbm:
            says = f"{total / 1e9:.1f} GB predicted, {platform.chip.name} holds {platform.chip.hbm / 1e9:.0f} GB"
            source = {"kind": "modelled", "source": f"bytes alive in the eager run; {platform.chip.source}"}
            found.append(Finding(identity("memory", platform.name), "memory", platform.name, says=says, blocking=True, evidence=source))
    return {**parts, "total": total}, found


def of_precision(ops: Sequence[Op], platforms: Sequence[Platform]) -> list[Finding]:
    """Where float32 products are computed with fewer bits by default."""
    products = [op.group for op in ops if op.group.flops > op.group.bytes and any(m.dtype == "float32" for m in op.group.metas)]
    products = [g for g in products if g.op.rpartition("::")[2] in ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward")]
    if not products:
        return []
    return [
        Finding(
            identity("precision", p.name),
            "precision",
            p.name,
            calls_per_step=sum(g.count for g in products),
            says=p.describes["precision"],
            evidence={"kind": "declared", "source": p.describes["precision_source"]},
        )
        for p in platforms
    ]


def ranked(found: Iterable[Finding]) -> list[Finding]:
    """Blocking first, then the time that is saved, then by kind."""
    return sorted(found, key=lambda f: (not f.blocking, -f.saved, KINDS.index(f.kind), -f.calls_per_step, f.id))
