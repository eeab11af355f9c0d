"""Blocks of a model on a TPU that is not here: without kdk, with every kernel of kdk's, and as torch.compile leaves kdk's operators."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kdk import tuning
from kdk.backends import TARGETS
from kdk.dispatch import load_kernel, refusal
from kdk.indices import Indices
from kdk.registry import OPERATORS
from kdk_bench.benchmarking.blocks import BLOCKS, operators
from kdk_bench.benchmarking.measuring import Heat
from kdk_bench.modelled import tpu
from kdk_bench.modelled.block_program import COMPILED, KERNELS, PLAIN, Program
from kdk_bench.modelled.pallas import BASELINE, Model, compared, entry
from kdk_bench.modelled.rows import UNKNOWN, Reference, Row, failed
from kdk_bench.modelled.stored import Stored, Traced, keep, lowered, of_program

MOST_FLOPS = 3e11  # of a block's matrices: what the profiler simulates in a minute or two on a busy machine
MOST_SCORES = 1 << 23  # of attention, all heads: of four times as many it does not end within its limit
SAME = "the same program as without kdk"
NOT_TPU = "blocks are modelled on TPUs alone: for other chips there is no compiler of whole programs here"


@functools.cache
def _described(model: str, name: str) -> tuple[int, int, int]:
    """(hidden size, elements of the matrices that a token goes through, heads of attention) of a block."""
    module, hidden = Program(model, name, "forward", PLAIN).module(torch.bfloat16)
    attention: Any = getattr(module, "attention", None)
    heads = int(attention.config.num_attention_heads) if attention is not None else 0
    return hidden, sum(math.prod(p.shape) for p in module.parameters()), heads


def heats(model: str, tokens: int, directions: Sequence[str], dtypes: Sequence[str], targets: Sequence[str]) -> list[tuple[Heat, str]]:
    """(heat, block) of every block; the sequence is halved until the profiler bears it."""
    found = []
    for name in BLOCKS:
        hidden, elements, heads = _described(model, name)
        for direction in directions:
            length, flops = tokens, 2 * elements * (1 if direction == "forward" else 3)
            while length > 1 and (length * flops > MOST_FLOPS or heads * length**2 > MOST_SCORES):
                length //= 2
            sizes = {"tokens": length, "hidden": hidden}
            for dtype in dtypes:
                for target in targets:
                    cut = length != tokens
                    found.append((Heat(f"{model}: {name}", direction, dtype, target, model, sizes, cut, operators(model, name)), name))
    return found


def run(plan: Sequence[tuple[Heat, str]], progress: Callable[[], None] = lambda: None) -> list[Row]:
    """The rows of every block."""
    rows: list[Row] = []
    with Model(None, Stored()) as model:
        for heat, name in plan:
            if TARGETS[heat.target] != "pallas":
                rows.append(Row(heat, PLAIN, "", UNKNOWN, NOT_TPU))
            else:
                rows += _rows(model, heat, name)
            progress()
    return rows


def _rows(model: Model, heat: Heat, name: str) -> list[Row]:
    found: list[Row] = []
    keys: dict[str, str] = {}
    for variant in (PLAIN, KERNELS, COMPILED):
        program = Program(heat.case, name, heat.direction, variant, heat.target if variant == COMPILED else "")
        own = "default" if variant != PLAIN else ""
        try:
            keys[variant] = key(program, heat)
            row = entry(heat, variant, own, estimate(model, program, heat))
        except Exception as error:
            row = failed(heat, variant, own, error)
        if own and keys.get(variant) == keys.get(PLAIN):
            row = replace(row, caveats=(*row.caveats, SAME), reason=f"{SAME}: {row.reason}" if row.reason else "")
        found.append(row)
    rows = compared(found, found[0])
    loses = any(row.contender == KERNELS and any((ratio or 0) > 1 for ratio in row.ratios.values()) for row in rows)
    return [*rows, *_alone(model, heat, name)] if loses else rows


def calls(heat: Heat, name: str) -> list[tuple[str, str, tuple[Any, ...]]]:
    """The calls of kdk's operators in a block: (operator, direction, arguments on the meta device)."""
    program = Program(heat.case, name, heat.direction, KERNELS)
    return traced(program, program.arguments(heat.sizes["tokens"], getattr(torch, heat.dtype))).found


def traced(program: Program, args: Sequence[torch.Tensor]) -> Traced:
    """What a program asks of torch. args: on the meta device."""
    with Traced(args) as found:
        program(*args)
    return found


def key(program: Program, heat: Heat) -> str:
    """The number of a block's program: of two that are equal, the same."""
    return of_program(traced(program, program.arguments(heat.sizes["tokens"], getattr(torch, heat.dtype))), heat.target)


def estimate(model: Model, program: Program, heat: Heat) -> tpu.Estimate:
    """A block's program for a chip. What torch.compile leaves of kdk is often the program without kdk: it is lowered once."""
    number = key(program, heat)
    known = lowered(number)
    if known:
        model.lowered[number] = known
    args = program.arguments(heat.sizes["tokens"], getattr(torch, heat.dtype))
    found = model.torch(number, program, args, heat.target)
    keep(number, model.lowered[number][0])
    return found


def _alone(model: Model, heat: Heat, name: str) -> list[Row]:
    """Where a block loses by kdk's kernels: each of them by itself at the block's shapes, against its reference by itself."""
    rows = []
    for op, direction, args in {_shape(call): call for call in calls(heat, name)}.values():
        own = replace(heat, op=f"{op} alone", direction=direction, case=heat.op)
        plain = entry(own, BASELINE, "", model.torch((_shape((op, direction, args)), "alone"), Reference(op, direction), args, heat.target))
        rows += compared([entry(own, "the kernel", "", _kernel(model, op, direction, args, heat.target)), plain], plain)
    return rows


def _shape(call: tuple[str, str, tuple[Any, ...]]) -> tuple[Any, ...]:
    op, direction, args = call
    return (op, direction, *[(tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else a for a in args])


def _kernel(model: Model, op: str, direction: str, args: tuple[Any, ...], target: str) -> tpu.Estimate:
    """A kernel as the operator's body would call it."""
    from kdk.backends import LANGUAGES

    declared, language = OPERATORS[op].op, LANGUAGES[TARGETS[target]]
    language.module("launch").prepare()
    kernel = load_kernel(declared, language.name, direction)
    if kernel is None:
        return tpu.Estimate(target, None, why_not=f"{op} has no {language.name} kernel for its {direction}")
    given = Indices(declared, direction).narrowed(args)
    reason = refusal(language, target, kernel)(given)
    if reason:
        return tpu.Estimate(target, None, why_not=reason)
    parameters = tuning.launch_parameters(declared, direction, target, kernel, warnings.warn)(given)
    return tpu.of_jax(model.profiler, kernel.configured(parameters), kernel.arguments(*given), target)
