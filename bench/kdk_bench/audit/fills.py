"""What fills a gap: an operator of kdk with its evidence on the platform, a known rewrite, or nothing yet."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from kdk import registry
from kdk.dispatch import kernel_file
from kdk.selection import IMPLEMENTATIONS
from kdk_bench import evidence
from kdk_bench.audit.matching import Hit
from kdk_bench.audit.support import Platform
from kdk_bench.audit.trace import Capture

REWRITES = Path(__file__).parent / "rewrites.json"
LANGUAGE = {"tpu": "pallas", "neuron": "nki", "xla": "pallas", "cuda": "triton"}


def refusal(hit: Hit, capture: Capture, platform: Platform) -> str:
    """Why the kernel for the platform does not take the model's own tensors, or "" (also where nobody can be asked)."""
    operator = registry.OPERATORS.get(hit.chain.name)
    file = kernel_file(operator.op, LANGUAGE[platform.name], "forward") if operator else None
    kept = {name: capture.tensors.get(given.value, (None,))[0] for name, given in hit.inputs.items()}
    if file is None or any(v is None for v in kept.values()):
        return ""
    values = {name: hit.inputs[name].of(tensor) for name, tensor in kept.items()}
    try:
        importlib.import_module(f"kdk.backends.{LANGUAGE[platform.name]}.launch").prepare()
        supports = getattr(importlib.import_module(file), "supports", None)
    except ImportError:
        return ""  # the language is not here: kdk check says so
    arguments = [values[n] if n in values else hit.scalars.get(n) for n in hit.chain.arguments]
    return (supports(platform.chip.name, *arguments) or "") if supports else ""


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
