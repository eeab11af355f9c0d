"""`kdk bench`: who is fastest, and by how much."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from kdk.errors import UsageError

REGRESSED = 1


@click.command("bench")
@click.argument("ops", nargs=-1, metavar="[OP]...")
@click.option("--block", "block", metavar="MODEL", help="Blocks of a model instead: llama-3-8b, qwen3-moe, mixtral or gemma-3.")
@click.option("--tokens", default=128, show_default=True, help="Length of the sequence that runs through a block.")
@click.option("--direction", "directions", multiple=True, type=click.Choice(["forward", "backward"]))
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
    tokens: int,
    directions: tuple[str, ...],
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

    Without OP, every operator; with --ops, those of that folder.
    """
    from kdk_bench import report
    from kdk_bench.benchmarking import baseline as comparing
    from kdk_bench.benchmarking import reporting

    if fail_on_regression is not None and not baseline:
        raise UsageError("KDK-BASELINE", "--fail-on-regression compares with a baseline", way_out="give --baseline FILE")
    old = comparing.load(baseline) if baseline else None
    if block and ops:
        raise UsageError("KDK-BENCH", "--block and operators exclude each other", value=" ".join(ops))
    console = report.console(to_stderr=json_file == "-")
    if block:
        entries = _run_blocks(block, tokens, directions, dtypes, device, seconds)
    else:
        plan = _plan(ops, directions, case, dtypes, device, directory)
        entries = _run(plan, seconds, against, json.loads(Path(prices).read_text()) if prices else {})
    reporting.table(entries, console)
    found = reporting.as_json(entries)
    if json_file:
        report.write_json(found, json_file)
    if plots or html:
        from kdk_bench.benchmarking import page

        page.write(found["results"], plots, html)
    code = reporting.exit_code(entries)
    if old is not None:
        code = max(code, _compare(comparing.changes(found["results"], old), fail_on_regression, console), key=lambda c: c == REGRESSED)
    return code


def _plan(
    ops: tuple[str, ...], directions: tuple[str, ...], case: str, dtypes: tuple[str, ...], device: str, directory: str | None
) -> list[tuple[Any, ...]]:
    """Every race: (operator, direction, dtype, case, device, target)."""
    import kdk.ops  # noqa: F401
    from kdk.registry import OPERATORS, load_directory, require
    from kdk_bench.benchmarking.measuring import case_named
    from kdk_bench.places import benched

    own = [operator.op.name for operator in load_directory(directory)] if directory else []
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
    from rich.console import Console
    from rich.progress import Progress

    from kdk_bench.benchmarking.measuring import Race, measure

    entries = []
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("racing", total=len(plan))
        for race in plan:
            entries += measure(Race(*race), seconds=seconds, against=against, price=prices.get(race[-1]))
            progress.advance(task)
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
