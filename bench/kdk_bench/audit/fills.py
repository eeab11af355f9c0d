"""What fills a gap: an operator of kdk with its evidence on the platform, a known rewrite, or nothing yet."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kdk import registry
from kdk.dispatch import kernel_file
from kdk.op import Op
from kdk.selection import IMPLEMENTATIONS
from kdk_bench import evidence
from kdk_bench.audit.chains import unify
from kdk_bench.audit.matching import Hit
from kdk_bench.audit.support import Platform
from kdk_bench.audit.trace import Capture, Group

REWRITES = Path(__file__).parent / "rewrites.json"
LANGUAGE = {"tpu": "pallas", "neuron": "nki", "xla": "pallas", "cuda": "triton"}


OPEN: dict[str, Any] = {"what": "open", "name": "", "evidence": []}


def _supports(op: Op, platform: Platform) -> Callable[..., str | None] | None:
    """The function with which the platform's kernel refuses; None where it has none, or its language is not here."""
    file = kernel_file(op, LANGUAGE[platform.name], "forward")
    if file is None:
        return None
    try:
        importlib.import_module(f"kdk.backends.{LANGUAGE[platform.name]}.launch").prepare()
        return getattr(importlib.import_module(file), "supports", None)
    except ImportError:
        return None  # kdk check says so


def for_operator(group: Group, platform: Platform, fills: Mapping[str, dict[str, Any]], otherwise: dict[str, Any]) -> dict[str, Any]:
    """What fills an aten operator, unless the kernel refuses tensors like the model's."""
    entry = fills.get(group.name, otherwise)
    op = next((o.op for o in registry.OPERATORS.values() if group.name in o.op.fills), None)
    supports = _supports(op, platform) if op and entry.get("what") == "kdk" else None
    needed = [name for name in op.tensors if name not in op.optional] if op else []
    if op is None or supports is None or len(group.metas) != len(needed):
        return entry
    sizes: dict[str, int] | None = {}
    for name, meta in zip(needed, group.metas):
        sizes = unify(op.shapes[name], meta.shape, sizes) if sizes is not None else None
    if sizes is None:
        return entry  # it takes them in another form
    tensors = {n: torch.empty(m.shape, dtype=getattr(torch, m.dtype), device="meta") for n, m in zip(needed, group.metas)}
    reason = supports(platform.chip.name, *_arguments(op, tensors))
    return {**OPEN, "name": f"{entry['name']} refuses: {reason}"} if reason else entry


def _arguments(op: Op, given: Mapping[str, Any]) -> list[Any]:
    """All arguments of the operator in order: those given, else their defaults, else None."""
    return [given.get(name, None if p.default is p.empty else p.default) for name, p in op.arguments.items()]


def refusal(hit: Hit, capture: Capture, platform: Platform) -> str:
    """Why the kernel for the platform does not take the model's own tensors, or "" (also where nobody can be asked)."""
    operator = registry.OPERATORS.get(hit.chain.name)
    kept = {name: capture.tensors.get(given.value, (None,))[0] for name, given in hit.inputs.items()}
    supports = _supports(operator.op, platform) if operator and not any(v is None for v in kept.values()) else None
    if operator is None or supports is None:
        return ""
    values = {name: hit.inputs[name].of(tensor) for name, tensor in kept.items()}
    return supports(platform.chip.name, *_arguments(operator.op, {**hit.scalars, **values})) or ""


def fills(platform: str) -> dict[str, dict[str, Any]]:
    """By aten operator and by name of a formula. An operator without a kernel for the platform does not fill: it is open there."""
    language = LANGUAGE[platform]
    records = evidence.load()
    found: dict[str, dict[str, Any]] = {}
    for name, text in json.loads(REWRITES.read_text()).items():
        found[name] = {"what": "rewrite", "name": text, "evidence": []}
    for name, operator in registry.OPERATORS.items():
        mine = [r for r in records if r["op"] == name and r["implementation"] == language and evidence.shows_results(r)]
        known = [f"{r['direction']} {r['target']}: {r['evidence']} ({r['report']}), {r['date']}" for r in mine]
        kernels = [i for i in (language, "torch") if i in IMPLEMENTATIONS and kernel_file(operator.op, i, "forward")]
        if kernels:
            filled = {"what": "kdk", "name": f"kdk.ops.{name} ({kernels[0]})", "evidence": known or ["declared: a kernel, not yet checked"]}
        else:
            filled = {"what": "open", "name": f"kdk.ops.{name} has no {language} kernel yet", "evidence": []}
        found[name] = filled
        for aten in operator.op.fills:
            found[aten] = filled
    return found
