"""The command `kdk tune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kdk_bench.options import DIRECTION, DTYPE, JSON, OPS, TARGET, load, options, progress


@click.command("tune")
@click.argument("ops", nargs=-1, required=True, metavar="OP...")
@options(TARGET, DIRECTION, DTYPE)
@click.option("--case", default="", metavar="NAME", help="A model's shapes; all: every one. Default: the operator's first.")
@click.option("--block", "models", multiple=True, metavar="MODEL", help="Who wins in this model's blocks, too (TPU): llama-3-8b ...")
@click.option("--tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Length of a block's sequence.")
@click.option("--shipped", is_flag=True, help="Write the operator's own folder, not the user's cache.")
@options(JSON, OPS)
def tune_command(
    ops: tuple[str, ...],
    targets: tuple[str, ...],
    directions: tuple[str, ...],
    dtypes: tuple[str, ...],
    case: str,
    models: tuple[str, ...],
    tokens: int,
    shipped: bool,
    json_file: str | None,
    directory: str | None,
) -> int:
    """Search the launch parameters of an operator's kernels, each candidate compiled for the chip, and record what gains.

    A chip that is here is timed. Of one that is not, the cost is modelled (TPU, Trainium) or what the compiled kernel uses (GPU).
    """
    from kdk.errors import UsageError
    from kdk.registry import require
    from kdk_bench import report as reports
    from kdk_bench.modelled import blocks, running
    from kdk_bench.places import local_targets
    from kdk_bench.runner import targets_of
    from kdk_bench.tune import in_blocks, report, search

    load(directory)
    require(ops)
    devices = local_targets()
    wanted = targets_of(targets) or list(devices)
    if not wanted:
        raise UsageError("KDK-TUNE", "no target, and no accelerator is here", way_out="--target v6e, sm_90, trn2 ...")
    console = reports.console(to_stderr=json_file == "-")
    plan = running.heats(ops, directions or ("forward", "backward"), case, dtypes, wanted)
    if not plan:
        given = " ".join(map(str, filter(None, (*ops, *(directions or ()), case, *(dtypes or ()), *wanted))))
        raise UsageError("KDK-TUNE", "nothing to tune: the filters leave nothing", value=given, way_out="`kdk list` shows what there is")
    in_models = [heat for m in models for heat in blocks.heats(m, tokens, directions or ("forward", "backward"), ("bfloat16",), wanted)]
    with progress("tuning", len(plan) + len(ops) * len(in_models)) as advance:
        tuned = search.run(plan, directory, devices, advance)
        compared = [each for op in ops for each in in_blocks.run(op, in_models, advance)]
    report.tables(tuned, compared, console)
    for file in record(tuned, compared, shipped):
        console.print(f"recorded in {file}", soft_wrap=True)
    if json_file:
        reports.write_json(report.as_json(tuned, compared), json_file)
    return report.exit_code(tuned, compared)


def record(tuned: Sequence[Any], compared: Sequence[Any], shipped: bool) -> list[Path]:
    """Write what was found out; the files."""
    from kdk import tuning
    from kdk.errors import UsageError
    from kdk.registry import OPERATORS
    from kdk_bench.tune import in_blocks, search

    changes: dict[tuple[str, str], dict[tuning.Key, dict[str, Any]]] = {}

    def add(op: str, target: str, key: tuning.Key, parts: Mapping[str, Any]) -> None:
        changes.setdefault((op, target), {}).setdefault(key, {}).update(parts)

    for each in tuned:
        heat = each.heat
        if each.outcome in (search.TUNED, search.KEPT):
            add(heat.op, heat.target, tuning.key(heat.direction, heat.dtype, heat.sizes), each.parts())
    for op, target in dict.fromkeys((each.op, each.heat.target) for each in compared):
        for key, part in in_blocks.worst([e for e in compared if (e.op, e.heat.target) == (op, target)]).items():
            add(op, target, key, {"block": part})
    files = []
    for (name, target), parts in changes.items():
        op = OPERATORS[name].op
        file = (tuning.shipped_file if shipped else tuning.user_file)(op, target)
        try:
            tuning.write(file, op, target, parts)
        except OSError as error:
            limit = error.strerror or str(error)
            way_out = "without --shipped the user's cache is written" if shipped else "make it writable"
            raise UsageError("KDK-TUNING", "the tuning file cannot be written", value=file, limit=limit, way_out=way_out) from None
        files += [file] if file.exists() else []
    return files
