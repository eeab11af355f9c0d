"""`kdk bench`: who is fastest, and by how much."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kdk.errors import UsageError
from kdk_bench.options import DIRECTION, TARGET, load, options, progress

REGRESSED = 1


@click.command("bench")
@click.argument("ops", nargs=-1, metavar="[OP]...")
@click.option("--block", "block", metavar="MODEL", help="Blocks of a model instead: llama-3-8b, qwen3-moe, mixtral or gemma-3.")
@click.option("--tokens", type=int, default=None, help="Length of a block's sequence. Default: 128 measured, 2048 modelled.")
@options(DIRECTION, TARGET)
@click.option("--case", default="", metavar="NAME", help="A model's shapes; all: every one. Default: the operator's first.")
@click.option("--dtype", "dtypes", multiple=True, metavar="DTYPE", help="Default: float32 on the CPU, bfloat16 elsewhere.")
@click.option("--device", default="", metavar="DEVICE", help="cpu, cuda, cuda:1, tpu, neuron, xla. Default: the accelerator, else cpu.")
@click.option("--against", multiple=True, metavar="NAME", help="Only these contenders, beside kdk's and the eager reference.")
@click.option("--seconds", default=2.0, show_default=True, help="Of timing per race, warm-up and compilation apart.")
@click.option("--prices", metavar="FILE", type=click.Path(exists=True, dir_okay=False), help='JSON: {"sm_90": 3.5} per hour.')
@click.option("--baseline", metavar="FILE", help="An earlier --json report to compare with.")
@click.option("--fail-on-regression", type=float, metavar="P", help="Exit 1 if kdk is surely slower than the baseline by P %.")
@click.option("--json", "json_file", metavar="FILE", help="Write the report as JSON; - is standard output.")
@click.option("--plot", "plots", metavar="DIR", help="Write a roofline and times by size as PNG.")
@click.option("--html", "html", metavar="FILE", help="Write one self-contained page.")
@click.option("--ops", "directory", metavar="DIR", help="Also take the operators in a folder of your own.")
def bench_command(
    ops: tuple[str, ...],
    block: str | None,
    tokens: int | None,
    directions: tuple[str, ...],
    targets: tuple[str, ...],
    case: str,
    dtypes: tuple[str, ...],
    device: str,
    against: tuple[str, ...],
    seconds: float,
    prices: str | None,
    baseline: str | None,
    fail_on_regression: float | None,
    json_file: str | None,
    plots: str | None,
    html: str | None,
    directory: str | None,
) -> int:
    """Time kdk's implementations in turns with the eager and the compiled reference, torch's own function and installed
    peers. Each is checked on the same inputs first: a wrong one is shown as wrong and not timed.

    With --target, chips that are not here are modelled: kernels of TPUs beside what a user has without kdk and beside the
    roofline, engine times of Trainium, bytes and resources of GPUs beside Inductor's kernel. A chip that is here is timed.

    Without OP, every operator; with --ops, those of that folder.
    """
    from kdk_bench import report
    from kdk_bench.benchmarking import baseline as comparing
    from kdk_bench.benchmarking import reporting
    from kdk_bench.modelled import running

    _check_numbers(seconds, tokens, fail_on_regression)
    _check_together(bool(block), ops, tokens, against, baseline, fail_on_regression)
    costs = _prices(prices) if prices else {}
    old = comparing.load(baseline) if baseline else None
    console = report.console(to_stderr=json_file == "-")
    device, absent = _where(targets, device)
    entries: list[Any] = []
    rows: list[Any] = []
    if block:
        entries = _run_blocks(block, tokens or 128, directions, dtypes, device, seconds) if not absent or device else []
        rows = _model_blocks(block, tokens or 2048, directions, dtypes, absent)
    else:
        if not absent or device:
            plan = _plan(ops, directions, case, dtypes, device, directory)
            _check_against(against, plan)
            entries = _run(plan, seconds, against, costs)
        elif against:
            value, limit = ", ".join(against), "chips that are modelled have no contenders to choose from"
            raise UsageError("KDK-BENCH", "--against is for races on a device", value=value, limit=limit, way_out="leave it out")
        rows = _model(ops, directions, case, dtypes, absent, directory)
    reporting.table(entries, console)
    running.tables(rows, console)
    found = reporting.as_json(entries, rows)
    if json_file:
        report.write_json(found, json_file)
    if plots or html:
        from kdk_bench.benchmarking import page

        page.write(found["results"], plots, html)
    codes = [reporting.exit_code(entries)] if entries else []
    codes += [running.exit_code(rows)] if rows else []
    code = 1 if 1 in codes else max(codes, default=3)
    if old is not None:
        code = max(code, _compare(comparing.changes(found["results"], old), fail_on_regression, console), key=lambda c: c == REGRESSED)
    return code


def _check_numbers(seconds: float, tokens: int | None, percent: float | None) -> None:
    """Raise UsageError for a number that means nothing."""
    if not (seconds > 0 and math.isfinite(seconds)):
        way_out = "leave it out for 2 seconds a race"
        raise UsageError("KDK-BENCH", "--seconds", value=seconds, limit="a finite number above 0", way_out=way_out)
    if tokens is not None and tokens < 1:
        raise UsageError("KDK-BENCH", "--tokens", value=tokens, limit="at least 1", way_out="leave it out for the usual length")
    if percent is not None and not (percent >= 0 and math.isfinite(percent)):
        way_out = "5 lets kdk be 5 % slower than the baseline"
        raise UsageError("KDK-BASELINE", "--fail-on-regression", value=percent, limit="a finite number, 0 or more", way_out=way_out)


def _check_together(
    block: bool, ops: Sequence[str], tokens: int | None, against: Sequence[str], baseline: str | None, percent: float | None
) -> None:
    """Raise UsageError for options that have no meaning beside each other: none is ignored in silence."""
    if percent is not None and not baseline:
        raise UsageError("KDK-BASELINE", "--fail-on-regression compares with a baseline", value=percent, way_out="give --baseline FILE")
    if block and ops:
        raise UsageError("KDK-BENCH", "--block and operators exclude each other", value=" ".join(ops), way_out="leave one out")
    if block and against:
        limit = "a block runs as it is and patched, nothing else"
        raise UsageError("KDK-BENCH", "--against is for operators", value=", ".join(against), limit=limit, way_out="leave it out")
    if tokens is not None and not block:
        raise UsageError("KDK-BENCH", "--tokens is the length of a block's sequence", value=tokens, way_out="give --block MODEL")


def _check_against(against: Sequence[str], plan: Sequence[tuple[Any, ...]]) -> None:
    """Raise UsageError for a contender that no race has."""
    from kdk_bench.benchmarking.contenders import contenders

    if not against:
        return
    there = dict.fromkeys(c.name for name, direction, _, _, where, _ in plan for c in contenders(name, where, direction))
    for name in against:
        if name not in there:
            limit, way_out = f"there are {', '.join(there)}", "leave --against out for all of them"
            raise UsageError("KDK-BENCH", "--against names no contender of these races", value=repr(name), limit=limit, way_out=way_out)


def _prices(file: str) -> dict[str, float]:
    """Prices of an hour, by chip."""
    limit, way_out = 'a JSON object of positive numbers by chip, such as {"sm_90": 3.5}', "correct the file, or leave --prices out"
    try:
        found = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise UsageError("KDK-PRICES", f"cannot read the prices {file}", value=str(error), limit=limit, way_out=way_out) from None
    numbers = isinstance(found, dict) and all(isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0 for v in found.values())
    if not numbers:
        raise UsageError("KDK-PRICES", f"{file} is no table of prices", value=str(found)[:100], limit=limit, way_out=way_out)
    return dict(found)


def _where(targets: tuple[str, ...], device: str) -> tuple[str, list[str]]:
    """The device to time on, "" for the usual one, and the chips to model: those of the targets that are not here."""
    if not targets:
        return device, []
    if device:
        raise UsageError("KDK-BENCH", "--device times on a device, --target models a chip: give one", value=device)
    from kdk_bench.places import local_targets
    from kdk_bench.runner import targets_of

    wanted, here = targets_of(targets), {**local_targets(), "cpu": "cpu"}
    present = [here[target] for target in wanted if target in here]
    if len(present) > 1:
        raise UsageError("KDK-BENCH", "one device is timed in a run", value=", ".join(present), way_out="name one of them")
    return "".join(present), [target for target in wanted if target not in here]


def _model(
    ops: tuple[str, ...], directions: tuple[str, ...], case: str, dtypes: tuple[str, ...], targets: list[str], directory: str | None
) -> list[Any]:
    """The rows of chips that are not here."""
    if not targets:
        return []
    from kdk.registry import OPERATORS, require
    from kdk_bench.modelled import running

    own = load(directory)
    require(ops)
    plan = running.heats(ops or own or list(OPERATORS), directions or ("forward", "backward"), case, dtypes, targets)
    if not plan:
        raise UsageError("KDK-BENCH", "nothing to model: the filters leave no row", way_out="`kdk list` shows what there is")
    with progress("modelling", len(plan)) as advance:
        return running.run(plan, directory, advance)


def _model_blocks(model: str, tokens: int, directions: tuple[str, ...], dtypes: tuple[str, ...], targets: list[str]) -> list[Any]:
    """The rows of a model's blocks on chips that are not here."""
    if not targets:
        return []
    import kdk.ops  # noqa: F401
    from kdk_bench.modelled import blocks

    plan = blocks.heats(model, tokens, directions or ("forward", "backward"), dtypes or ("bfloat16",), targets)
    with progress("modelling", len(plan)) as advance:
        return blocks.run(plan, advance)


def _plan(
    ops: tuple[str, ...], directions: tuple[str, ...], case: str, dtypes: tuple[str, ...], device: str, directory: str | None
) -> list[tuple[Any, ...]]:
    """Every race: (operator, direction, dtype, case, device, target)."""
    from kdk.registry import OPERATORS, require
    from kdk_bench.benchmarking.measuring import case_named
    from kdk_bench.places import benched

    own = load(directory)
    require(ops)
    where, target = benched(device)
    races = []
    for name in ops or own or OPERATORS:
        op = OPERATORS[name].op
        working = [d for d in op.dtypes if d in dtypes] if dtypes else ["float32" if where.type == "cpu" else "bfloat16"]
        for direction in directions or ("forward", "backward"):
            if op.function(direction) is not None:
                races += [(name, direction, d, c, where, target) for d in working for c in case_named(name, case)]
    if not races:
        raise UsageError("KDK-BENCH", "nothing to time: the filters leave no race", way_out="`kdk list` shows what there is")
    return races


def _run(plan: list[tuple[Any, ...]], seconds: float, against: tuple[str, ...], prices: dict[str, float]) -> list[Any]:
    from kdk_bench.benchmarking.measuring import Race, measure

    entries = []
    with progress("racing", len(plan)) as advance:
        for race in plan:
            entries += measure(Race(*race), seconds=seconds, against=against, price=prices.get(race[-1]))
            advance()
    return entries


def _run_blocks(
    model: str, tokens: int, directions: tuple[str, ...], dtypes: tuple[str, ...], device: str, seconds: float
) -> list[Any]:
    import torch

    import kdk.ops  # noqa: F401
    from kdk_bench.benchmarking import blocks
    from kdk_bench.places import benched

    (where, target), entries = benched(device), []
    for dtype in dtypes or ("float32" if where.type == "cpu" else "bfloat16",):
        for name in blocks.BLOCKS:
            block = blocks.build(model, name, tokens, getattr(torch, dtype), where)
            for direction in directions or ("forward", "backward"):
                entries += blocks.measure(block, direction, target, seconds)
    return entries


def _compare(changes: list[Any], percent: float | None, console: Any) -> int:
    """Print how kdk's entries changed; 1 if one surely regressed by more than `percent`."""
    code = 0
    for change in changes:
        regressed = percent is not None and change.regressed(percent)
        code = REGRESSED if regressed else code
        console.print(f"{'[red]regressed[/] ' if regressed else ''}{change}", soft_wrap=True)
    if not changes:
        console.print("[yellow]nothing in common with the baseline: no entry of kdk's at equal sizes, dtype and target[/]")
    return code
